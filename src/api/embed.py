#!/usr/bin/python3
"""embed.py IN OUT NAME: writes the bytes of IN as the C array NAME."""
import sys

source, target, name = sys.argv[1:]
data = open(source, "rb").read()
lines = [", ".join(str(byte) for byte in data[at:at + 20]) for at in range(0, len(data), 20)]
with open(target, "w") as out:
    out.write('#include "api/openapi.h"\n\n')
    out.write(f"const char {name}[] = {{\n\t" + ",\n\t".join(lines + ["0"]) + "};\n")
    out.write(f"const size_t {name}_size = sizeof({name}) - 1;\n")
