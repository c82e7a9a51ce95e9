"""The list of the clients that may connect to a core over TCP: a text file beside the server's key file.

Each line has a name and a public key. The core reads the file whenever a client connects, so a change needs no restart.
"""

import os
import re
import tempfile
from pathlib import Path

from vllm_mp.keys.curve_keys import decode_key, encode_key
from vllm_mp.machine.file_owner import check_writers, trusted_owners

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HEADER = (
    "# Clients that may connect: NAME PUBLIC-KEY. Change it with `vllm-mp keys allow` and `vllm-mp keys revoke`.\n"
)


class AuthorizedClients:
    """The list that belongs to a server's key file."""

    def __init__(self, key_file: str | os.PathLike[str]) -> None:
        self.path = Path(f"{os.fspath(key_file)}.clients")

    def read(self) -> dict[str, bytes]:
        """Return the public keys by name; none if there is no list.

        Raises ValueError, with the remedy, if the list cannot be read, is damaged, or can be written by other users.
        """
        try:
            check_writers(self.path, trusted_owners())
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ValueError(f"cannot read {self.path}: {error.strerror}; check its permissions") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not a text file: {error}; correct it") from error
        clients = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, key = line.partition(" ")
            try:
                clients[name] = decode_key(key)
            except ValueError as error:
                raise ValueError(f"line {number} of {self.path} is not NAME PUBLIC-KEY: {error}; correct it") from error
        return clients

    def allow(self, name: str, public: bytes) -> None:
        """Add a client. Raises ValueError if the name is not allowed or taken, or the key is in the list already."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name {name!r:.100} must be 1 to 64 letters, digits or . _ @ -; choose another")
        clients = self.read()
        if name in clients:
            raise ValueError(f"{self.path} has a client {name}; revoke it first, or choose another name")
        for other, key in clients.items():
            if key == public:
                raise ValueError(f"this key is in {self.path} already, as {other}; give each client a key of its own")
        self._write({**clients, name: public})

    def revoke(self, name: str) -> None:
        """Remove a client. Raises ValueError, with the names that there are, if there is no such client."""
        clients = self.read()
        if clients.pop(name, None) is None:
            raise ValueError(f"{self.path} has no client {name!r:.100}; it has {', '.join(clients) or 'none'}")
        self._write(clients)

    def _write(self, clients: dict[str, bytes]) -> None:
        """Replace the file in one step, so that the core never reads a part of it. Raises ValueError if it cannot."""
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(_HEADER + "".join(f"{name} {encode_key(key)}\n" for name, key in clients.items()))
            os.replace(file.name, self.path)
        except OSError as error:
            raise ValueError(f"cannot write {self.path}: {error.strerror}; check the folder") from error
