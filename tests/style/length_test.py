"""Source files stay readable: at most 1,000 lines of at most 120 columns, functions of at most 120 lines."""
import re

from tree import files, finish, name, without_comments

LINES_MAX = 1000
FUNCTION_LINES_MAX = 120


def functions(text):
    """(name, first line, lines) of each function body; the tree's format puts both braces into column 0."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line != "{" or number == 0:
            continue
        head = " ".join(lines[max(0, number - 6):number])
        match = re.findall(r"(\w+)\s*\([^;{}]*\)\s*$", head)
        end = next((i for i in range(number + 1, len(lines)) if lines[i] == "}"), None)
        if match and end is not None:
            yield match[-1], number + 1, end - number - 1


def main():
    problems = []
    sources = files("src/*.c", "src/*.h", "tests/*.c", "tests/*.h", "tests/*.py", "scripts/*", "bench/*.py")
    for path in sources:
        text = path.read_text(errors="replace")
        count = text.count("\n")
        if count > LINES_MAX:
            problems.append(f"{name(path)}: {count} lines, more than {LINES_MAX}")
        if not text.endswith("\n"):
            problems.append(f"{name(path)}: no newline at the end")
        for number, line in enumerate(text.splitlines(), 1):
            if line.rstrip() != line:
                problems.append(f"{name(path)}:{number}: blanks at the end of the line")
        if path.suffix == ".c":
            for function, number, size in functions(without_comments(text)):
                if size > FUNCTION_LINES_MAX:
                    problems.append(f"{name(path)}:{number}: {function}() has {size} lines")
    finish(problems, len(sources))


main()
