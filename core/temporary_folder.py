"""The folder of temporary files of a core's processes, also on a full disk."""

import os
import tempfile


def settle_temporary_folder() -> None:
    """Let `tempfile.gettempdir` return a folder even if no file can be written anywhere; then it is the usual one.

    Libraries ask for the folder when they are imported, whether or not they will write a file: the error of a full disk
    would end a process that needs none.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR") or "/tmp"
