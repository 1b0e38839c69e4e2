"""What the style checks share: the list of files and the way to report."""
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()


def files(*patterns):
    """Files of the tree (also not yet added ones), without what is ignored."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard",
         "--", *patterns],
        cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if listed.returncode == 0:
        names = [name.decode() for name in listed.stdout.split(b"\0") if name]
        paths = [ROOT / name for name in dict.fromkeys(names)]
    else:  # a source archive
        paths = sorted({path for pattern in patterns for path in ROOT.rglob(pattern) if "build" not in path.parts[0]})
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def name(path):
    return str(path.relative_to(ROOT))


def finish(problems, checked):
    for problem in problems:
        print(problem)
    print(f"{checked} checked, {len(problems)} wrong")
    if not checked:
        print("nothing was checked: the list of files is empty")
        sys.exit(1)
    sys.exit(1 if problems else 0)


def without_comments(text):
    """C source with comments and the content of literals blanked, lines kept."""
    out = []
    i = 0
    size = len(text)
    while i < size:
        two = text[i:i + 2]
        if two == "/*":
            end = text.find("*/", i + 2)
            end = size if end < 0 else end + 2
            out.append("".join("\n" if c == "\n" else " " for c in text[i:end]))
            i = end
        elif two == "//":
            end = text.find("\n", i)
            end = size if end < 0 else end
            out.append(" " * (end - i))
            i = end
        elif text[i] in "\"'":
            quote = text[i]
            end = i + 1
            while end < size and text[end] != quote and text[end] != "\n":
                end += 2 if text[end] == "\\" else 1
            out.append(quote + " " * (min(end, size) - i - 1) + quote)
            i = end + 1
        else:
            out.append(text[i])
            i += 1
    return "".join(out)
