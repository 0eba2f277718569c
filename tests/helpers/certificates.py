"""Certificates that a test signs itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificates(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1", days: int = 1) -> tuple[Path, Path]:
    """Return a new certificate for localhost and its key, as PEM files.

    names: the subjectAltName. days: how long it is valid; negative, if it has expired.
    """
    cert, key, request, extensions = (folder / name for name in ("cert.pem", "key.pem", "request.pem", "extensions"))
    extensions.write_text(f"subjectAltName={names}\nbasicConstraints=critical,CA:TRUE\n")
    _openssl(
        "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost",
        "-keyout", key, "-out", request,
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", request, "-signkey", key, "-days", str(days), "-extfile", extensions, "-out", cert,
    )  # fmt: skip
    return cert, key


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
