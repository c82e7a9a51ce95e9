"""The tenants of a server: each API key is one. Tenants take fair shares, and by default share no cached prefixes."""

import hashlib
import hmac
import secrets
from typing import Final

from starlette.types import Scope

from vllm_mp.client.prompts.prompt import MAX_SALT_CHARACTERS
from vllm_mp.server.http.options import ServerOptions

SECRET_BYTES: Final = 32
_LASTING_SECRET: Final = bytes(SECRET_BYTES)
"""The secret of servers whose core outlives them: with it, a salt depends on the API key alone."""
_SCOPE_KEY: Final = "vllm_mp.tenant"
_SALT_CHARACTERS: Final = 32


def different_keys(options: ServerOptions) -> tuple[str, ...]:
    """Return the API keys, each once; the position of a key is the number of its tenant."""
    return tuple(dict.fromkeys(options.api_key))


def num_tenants(options: ServerOptions) -> int:
    """Return the number of tenants; without keys, all clients are one tenant."""
    return max(1, len(different_keys(options)))


def new_secret(options: ServerOptions) -> bytes:
    """Return the secret from which a server makes the salts of its tenants, the same in all of its processes.

    It is random, unless the server connects to a core, whose prefix cache outlives the server: each start of each
    server of that core must then find what a tenant has cached.
    """
    return secrets.token_bytes(SECRET_BYTES) if options.connect is None else _LASTING_SECRET


def note_tenant(scope: Scope, number: int) -> None:
    """Note in the scope of a request which tenant sends it."""
    scope[_SCOPE_KEY] = number


def has_key(scope: Scope) -> bool:
    """Return whether a request has a valid key."""
    return _SCOPE_KEY in scope


class Tenant:
    """The holder of an API key."""

    def __init__(self, number: int, salt_key: bytes) -> None:
        """`salt_key` is the secret of the salts of this tenant; empty: tenants share cached prefixes."""
        self.number = number
        self._salt_key = salt_key

    def cache_salt(self, given: str | None) -> str:
        """Return the salt with which the core caches prefixes of a request that gives the salt `given`.

        It says nothing of the API key or of `given`, and no other tenant can have it. A salt that is too long is
        returned as it is, for the engine to refuse.
        """
        salt = given or ""
        if not self._salt_key or len(salt) > MAX_SALT_CHARACTERS:
            return salt
        return hmac.new(self._salt_key, salt.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
            :_SALT_CHARACTERS
        ]


class Tenants:
    """All tenants of a server."""

    def __init__(self, options: ServerOptions, secret: bytes | None = None) -> None:
        """`secret` is `new_secret` of the server; None: this process is the only one and makes its own."""
        keys = different_keys(options)
        secret = new_secret(options) if secret is None else secret
        has_salts = len(keys) > 1 and not options.shared_prefix_cache
        self._all = [
            Tenant(number, hmac.new(secret, key.encode(), hashlib.sha256).digest() if has_salts else b"")
            for number, key in enumerate(keys or ("",))
        ]

    def __len__(self) -> int:
        return len(self._all)

    def of(self, scope: Scope) -> Tenant:
        """Return the tenant that sends the request of `scope`."""
        return self._all[scope.get(_SCOPE_KEY, 0)]
