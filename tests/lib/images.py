"""A root file system with kernel and initrd, built once for all suites of a run."""
import hashlib
import os
import pathlib
import subprocess

import hostside

BUILD = pathlib.Path(os.environ.get("SPACE_TEST_BUILD", hostside.ROOT / "build-gcc"))
AGENT = BUILD / "src/guest/space-agent"
FILES = ("disk", "kernel", "initrd")


def build(folder, *words):
    """image-tool's output; raises CalledProcessError with its stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    work = hostside.BASE_DIR / "image-work"
    done = subprocess.run([BUILD / "src/image/image-tool", AGENT, folder, work, *words], check=True, timeout=1400,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return done.stdout


def shared():
    """A folder with FILES, which must not be written to."""
    digest = hashlib.sha256()
    for path in [AGENT, *sorted((hostside.ROOT / "src" / "image").glob("*.[ch]"))]:
        digest.update(path.read_bytes())
    folder = pathlib.Path(os.environ.get("SPACE_TEST_CACHE", hostside.BASE_DIR)) / f"image-{digest.hexdigest()[:16]}"
    if not (folder / "whole").exists():
        hostside.BASE_DIR.mkdir(mode=0o755, exist_ok=True)
        build(folder)
        (folder / "whole").write_text("")
    return folder


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
