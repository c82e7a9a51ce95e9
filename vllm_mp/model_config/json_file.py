"""Read the small JSON files beside a model's weights."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

Content = TypeVar("Content", dict[str, Any], list[Any])


def read_json(path: Path, kind: type[Content]) -> Content | None:
    """Return the content of `path`, which must be a JSON object (`kind` dict) or array (list); None without the file.

    Raises ValueError, naming the file, the cause and the remedy, if it cannot be read, is not valid JSON, or holds
    another kind of value.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {os.strerror(error.errno or 0)}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a {kind.__name__}; fetch the model again")
    return content
