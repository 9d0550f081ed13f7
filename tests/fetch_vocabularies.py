"""Fetches vocabularies with expected token ids into a folder: test oracles for the tokenizer.

Usage: python tests/fetch_vocabularies.py FOLDER. Writes FOLDER/.done only when it has them all.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/models/ggml-vocab-"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        print(f"Fetching test vocabularies from the source package of {PACKAGE} (77 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-binary", ":all:", "-d", temporary, PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            print(f"Could not fetch {PACKAGE}: the tests that need its vocabularies are skipped")
            return
        (archive,) = Path(temporary).glob("*.tar.gz")
        extract(archive, folder)
    (folder / ".done").touch()


def extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            if INSIDE in member.name and member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
