"""Every header compiles alone, twice included, and has its guard."""
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from tree import ROOT, files, finish, name

FLAGS = ["-std=gnu17", "-D_GNU_SOURCE", '-DSPACE_VERSION="0"', "-Wall", "-Wextra", "-Werror", "-Wstrict-prototypes",
         "-Wno-unused-parameter", "-fsyntax-only", f"-I{ROOT}/src", f"-I{ROOT}/tests/unit"]


def compile_alone(path, flags):
    include = path.relative_to(ROOT / "src") if (ROOT / "src") in path.parents else path
    guard = re.search(r"^#ifndef (\w+)\n#define \1$", path.read_text(), re.M)
    if not guard:
        return f"{name(path)}: no include guard"
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write(f'#include "{include}"\n#include "{include}"\n')
        source.flush()
        done = subprocess.run(["gcc", *FLAGS, *flags, source.name], stderr=subprocess.PIPE, text=True,
                              check=False)
    return f"{name(path)}: does not compile alone\n{done.stderr}" if done.returncode else None


def extra_flags():
    """Include folders that the build uses beyond the compiler's own (the build folder is the second argument)."""
    commands = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "build") / "compile_commands.json"
    if not commands.exists():
        return []
    flags = []
    for entry in json.loads(commands.read_text()):
        for word in shlex.split(entry["command"]):
            if word.startswith(("-I/", "-isystem/")) and word not in flags:
                flags.append(word)
    return flags


def main():
    headers = files("src/*.h")
    flags = extra_flags()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [problem for problem in pool.map(lambda path: compile_alone(path, flags), headers) if problem]
    finish(problems, len(headers))


main()
