"""The command `keys`: the keys with which core and clients talk over TCP, and the clients that may connect."""

import argparse

USAGE = "{server,client,allow,revoke,list} FILE [OPTIONS]"

_SERVER_FILE = "Use this key file of the server, as given to `vllm-mp engine --key-file`. Required."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog=parser.prog)
    for name, (help_text, run_command) in {
        "server": ("Make the key file of a server, and FILE.pub for its clients.", _make_server),
        "client": ("Make the key file of a client, and FILE.pub for the server.", _make_client),
        "allow": ("Let a client connect.", _allow),
        "revoke": ("Let a client connect no more.", _revoke),
        "list": ("List the clients that may connect.", _list),
    }.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        makes = name in ("server", "client")
        command.add_argument("file", metavar="FILE", help="Make this key file. Required." if makes else _SERVER_FILE)
        if name == "client":
            command.add_argument(
                "--server",
                required=True,
                metavar="KEY",
                help="Connect to the server with this public key, or .pub file. Required.",
            )
        if name in ("allow", "revoke"):
            command.add_argument("name", metavar="NAME", help="Call the client by this name in the list. Required.")
        if name == "allow":
            command.add_argument(
                "key", metavar="KEY", help="Allow this public key, or .pub file, of the client. Required."
            )
        command.set_defaults(run_command=run_command)


def run(args: argparse.Namespace) -> int:
    args.run_command(args)
    return 0


def _make_server(args: argparse.Namespace) -> None:
    from vllm_mp.keys.authorized_clients import AuthorizedClients
    from vllm_mp.keys.curve_keys import encode_key, make_server_key

    key = make_server_key(args.file)
    print(f"{args.file}: key of the server; start the core with --key-file {args.file}")
    print(f"{args.file}.pub: public key for clients, {encode_key(key.public)}")
    print(f"{AuthorizedClients(args.file).path}: list of clients, empty; `vllm-mp keys allow` adds to it")


def _make_client(args: argparse.Namespace) -> None:
    from vllm_mp.keys.curve_keys import encode_key, make_client_key, read_public_key

    key = make_client_key(args.file, read_public_key(args.server))
    print(f"{args.file}: key of this client; connect with --key-file {args.file}")
    print(f"on the server: vllm-mp keys allow SERVER-FILE NAME {encode_key(key.public)}")


def _allow(args: argparse.Namespace) -> None:
    from vllm_mp.keys.authorized_clients import AuthorizedClients
    from vllm_mp.keys.curve_keys import read_public_key, read_server_key

    read_server_key(args.file)
    AuthorizedClients(args.file).allow(args.name, read_public_key(args.key))
    print(f"{args.name} may connect")


def _revoke(args: argparse.Namespace) -> None:
    from vllm_mp.keys.authorized_clients import AuthorizedClients
    from vllm_mp.keys.curve_keys import read_server_key

    read_server_key(args.file)
    AuthorizedClients(args.file).revoke(args.name)
    print(f"{args.name} cannot connect again; a connection that is open lasts until it ends")


def _list(args: argparse.Namespace) -> None:
    from vllm_mp.keys.authorized_clients import AuthorizedClients
    from vllm_mp.keys.curve_keys import encode_key, read_server_key

    read_server_key(args.file)
    for name, key in AuthorizedClients(args.file).read().items():
        print(f"{name} {encode_key(key)}")
