"""#include lines of src/ obey the table "Who may include whom" of docs/ARCHITECTURE.md."""
import re

from tree import ROOT, files, finish, name

ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"


def table():
    """Room → entries it may include: a room ("http"), or one header of a room ("host/client.h")."""
    text = ARCHITECTURE.read_text()
    section = text.split("## Who may include whom", 1)[1].split("\n## ", 1)[0]
    allowed = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) < 2 or not re.fullmatch(r"`\w+`", cells[0]):
            continue
        allowed[cells[0].strip("`")] = set(re.findall(r"`([\w./*]+)`", cells[1]))
    return allowed


def permitted(room, include, entries):
    target = include.split("/", 1)[0]
    return target == room or target in entries or include in entries


def main():
    allowed = table()
    problems = []
    rooms = {path.name for path in (ROOT / "src").iterdir() if path.is_dir()}
    for room in sorted(rooms - allowed.keys()):
        problems.append(f"docs/ARCHITECTURE.md: room {room} is missing in the table")
    for room in sorted(allowed.keys() - rooms):
        problems.append(f"docs/ARCHITECTURE.md: there is no room {room}")
    for room, entries in allowed.items():
        for entry in sorted(entries):
            if not (ROOT / "src" / entry).exists():
                problems.append(f"docs/ARCHITECTURE.md: {room} may include {entry}, which does not exist")
    sources = files("src/*.c", "src/*.h")
    for path in sources:
        room = path.relative_to(ROOT / "src").parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if not match:
                continue
            include = match.group(1)
            where = f"{name(path)}:{number}"
            if include.startswith("../") or "/../" in include:
                problems.append(f"{where}: include {include} by its room, not by a relative path")
            elif "/" not in include:
                if not (path.parent / include).exists():
                    problems.append(f"{where}: {include} names no room; write ROOM/{include}")
            elif include.split("/", 1)[0] in rooms and not permitted(room, include, allowed.get(room, ())):
                problems.append(f"{where}: room {room} may not include {include} (docs/ARCHITECTURE.md)")
    finish(problems, len(sources))


main()
