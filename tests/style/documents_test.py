"""Documents, scripts and the package list agree with the tree."""
import ast
import re
import subprocess

from tree import ROOT, files, finish, name

USES = {"build", "run", "test"}


def check_packages(problems):
    seen = set()
    for number, line in enumerate((ROOT / "packages.txt").read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        columns = line.split(None, 2)
        where = f"packages.txt:{number}"
        if len(columns) < 3:
            problems.append(f"{where}: needs name, use and reason")
            continue
        for package in columns[0].split("|"):
            if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", package):
                problems.append(f"{where}: {package!r} is no package name")
            if package in seen:
                problems.append(f"{where}: {package} stands twice")
            seen.add(package)
        for use in columns[1].split(","):
            if use not in USES:
                problems.append(f"{where}: {use!r} is not one of {', '.join(sorted(USES))}")


def check_links(problems):
    for path in files("*.md"):
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
                problems.append(f"{name(path)}: links to {target}, which does not exist")
        for target in re.findall(r"`make ([a-z-]+)`", text):
            if not re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M):
                problems.append(f"{name(path)}: names make {target}, which does not exist")


def check_scripts(problems):
    for path in files("scripts/*", ".ci/*"):
        first = path.read_text().splitlines()[:1]
        shell = "bash" if first and "bash" in first[0] else "sh"
        done = subprocess.run([shell, "-n", str(path)], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            problems.append(f"{name(path)}: {done.stderr.strip()}")
        if not path.stat().st_mode & 0o100 and first and first[0].startswith("#!"):
            problems.append(f"{name(path)}: not executable")
    for path in files("*.py"):
        try:
            ast.parse(path.read_text(), str(path))
        except SyntaxError as error:
            problems.append(f"{name(path)}: {error}")


def main():
    problems = []
    check_packages(problems)
    check_links(problems)
    check_scripts(problems)
    for needed in ("README.md", "LICENSE", "docs/ARCHITECTURE.md", "docs/HACKING.md", "docs/openapi.yaml"):
        if not (ROOT / needed).exists():
            problems.append(f"{needed} is missing")
    finish(problems, len(files("*.md")) + len(files("scripts/*")))


main()
