"""No notes to self in the tree, and one word for one thing."""
import re

from tree import files, finish, name

# Notes that belong into an issue, not into a file.
NOTES = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# The glossary of docs/ARCHITECTURE.md has another word for it.
SYNONYMS = {
    r"\bhibernat(e|ed|es|ing|ion)\b": "suspend",
    r"\bcheckpoint(s|ed|ing)?\b": "snapshot",
    r"\brollback\b(?!_|\s*\()": "rewind",
    r"\bhypervisor\b": "engine or VMM",
}


def main():
    problems = []
    sources = [path for path in files("*.c", "*.h", "*.py", "*.sh", "*.md", "*.build", "*.yaml", "Makefile")
               if path.name != "words_test.py"]
    for path in sources:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for match in NOTES.finditer(line):
                problems.append(f"{name(path)}:{number}: {match.group()}: say it in an issue")
            if path.suffix not in (".c", ".h", ".md"):
                continue
            # SQL and SQLite own the words ROLLBACK and checkpoint.
            if re.search(r"wal|sql|transaction", line, re.I):
                continue
            for pattern, word in SYNONYMS.items():
                match = re.search(pattern, line)
                if match:
                    problems.append(f'{name(path)}:{number}: "{match.group()}": the word is {word}')
    finish(problems, len(sources))


main()
