"""Manual pages are clean: groff has no warning, each has the sections readers look for."""
import re
import shutil
import subprocess

from tree import files, finish, name

NEEDED = ("NAME", "SYNOPSIS", "DESCRIPTION")


def check(path):
    text = path.read_text()
    for section in NEEDED:
        if not re.search(rf'^\.S[Hh]\s+"?{section}"?\s*$', text, re.M):
            yield f"{name(path)}: no section {section}"
    package = "-mdoc" if re.search(r"^\.Dd", text, re.M) else "-man"
    done = subprocess.run(["groff", package, "-Tutf8", "-ww", "-z", "-K", "utf8", str(path)], stderr=subprocess.PIPE,
                          text=True, check=False)
    # groff's own tty macros and full justification are not the page's fault.
    for line in done.stderr.splitlines():
        if "cannot adjust line" not in line and "can't break line" not in line and "cannot break line" not in line:
            yield f"{name(path)}: {line}"


def main():
    if not shutil.which("groff"):
        print("groff is not installed")
        raise SystemExit(77)
    pages = files("*.1", "*.5", "*.8")
    finish([problem for path in pages for problem in check(path)], len(pages))


main()
