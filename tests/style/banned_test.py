"""Functions that are never called: they cannot be bounded, are not thread-safe, or run a shell."""
import re

from tree import files, finish, name, without_comments

BANNED = {
    "strcpy": "text_copy()", "strcat": "text_format()", "sprintf": "text_format()", "vsprintf": "text_format()",
    "stpcpy": "text_copy()", "strncpy": "text_copy()", "strncat": "text_format()",
    "atoi": "text_parse_u64()", "atol": "text_parse_u64()", "atoll": "text_parse_u64()",
    "strtok": "strtok_r() or strcspn()", "gets": "fd_read_full()", "system": "posix_spawn()",
    "popen": "posix_spawn()", "tmpnam": "mkostemp()", "tempnam": "mkostemp()", "mktemp": "mkostemp()",
    "rand": "random_bytes()", "srand": "random_bytes()", "random": "random_bytes()", "alloca": "malloc()",
    "localtime": "localtime_r()", "gmtime": "gmtime_r()", "ctime": "time_format_rfc3339()",
    "asctime": "time_format_rfc3339()",
}
CALL = re.compile(r"(?<![\w.>])(" + "|".join(BANNED) + r")\s*\(")
TYPEDEF_STRUCT = re.compile(r"\btypedef\s+(struct|union|enum)\b")


def main():
    problems = []
    sources = files("src/*.c", "src/*.h", "tests/*.c", "tests/*.h")
    for path in sources:
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1):
            for match in CALL.finditer(line):
                problems.append(f"{name(path)}:{number}: {match.group(1)}() is banned, use {BANNED[match.group(1)]}")
            if TYPEDEF_STRUCT.search(line):
                problems.append(f"{name(path)}:{number}: no typedef of structs, unions or enums")
    finish(problems, len(sources))


main()
