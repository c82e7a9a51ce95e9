"""Reading the small JSON files beside a model's weights."""

import json
import os
from pathlib import Path
from typing import Any


def read_json(path: Path, kind: type) -> Any:
    """The content of `path`; None without the file.

    Raises ValueError, naming the file and the remedy, for one that cannot be read or does not hold a `kind`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {os.strerror(error.errno or 0)}; check the folder's rights") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a {kind.__name__}; fetch the model again")
    return content
