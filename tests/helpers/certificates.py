"""Certificates that a test signs itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificates(folder: Path) -> tuple[Path, Path]:
    """Return a new certificate for localhost and its key, as PEM files."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out",
         str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
