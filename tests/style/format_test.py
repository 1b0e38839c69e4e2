"""C files are formatted by clang-format with the tree's own .clang-format (`make format` does it)."""
import re
import shutil
import subprocess

from tree import ROOT, files, finish, name


def main():
    tool = shutil.which("clang-format")
    if not tool:
        print("clang-format is not installed")
        raise SystemExit(77)
    sources = files("src/*.c", "src/*.h", "tests/*.c", "tests/*.h")
    done = subprocess.run([tool, "--dry-run", "--Werror", *map(str, sources)], cwd=ROOT, stderr=subprocess.PIPE,
                          text=True, check=False)
    wrong = sorted(set(re.findall(r"^(/[^:]+):\d+:\d+: error:", done.stderr, re.M)))
    problems = [f"{path}: not formatted; run make format" for path in wrong]
    if done.returncode and not problems:
        problems = [done.stderr]
    finish(problems, len(sources))


main()
