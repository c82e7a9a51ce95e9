"""Write two small tasks for lm-eval whose data needs no network.

`capitals` asks for the log-probability of four continuations of a sentence, and `sums` for the number that answers a
question. docs/using/clients.md shows how lm-eval runs them.
"""

import argparse
import json
import random
from pathlib import Path

_CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo", "Poland": "Warsaw",
    "Austria": "Vienna", "Hungary": "Budapest", "Ireland": "Dublin", "Cuba": "Havana", "Peru": "Lima",
    "Kenya": "Nairobi", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Belgium": "Brussels",
    "Thailand": "Bangkok", "Argentina": "Buenos Aires",
}  # fmt: skip
_CHOICES = 4
_SUMS = 20

_CAPITALS_TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{cities}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_SUMS_TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{a}}}} + {{{{b}}}}? Answer with the number only."
doc_to_target: "{{{{total}}}}"
generation_kwargs:
  until:
    - "\\n"
  max_gen_toks: 16
  do_sample: false
filter_list:
  - name: last-number
    filter:
      - function: regex
        regex_pattern: "(\\\\d+)"
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the tasks, which is made if it does not exist")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    _write(folder, "capitals", _CAPITALS_TASK, [_capital(chance, country) for country in _CAPITALS])
    sums = [(chance.randint(1, 9), chance.randint(1, 9)) for _ in range(_SUMS)]
    _write(folder, "sums", _SUMS_TASK, [{"a": a, "b": b, "total": str(a + b)} for a, b in sums])


def _capital(chance: random.Random, country: str) -> dict[str, object]:
    right = _CAPITALS[country]
    cities = [right, *chance.sample([city for city in _CAPITALS.values() if city != right], _CHOICES - 1)]
    chance.shuffle(cities)
    return {"country": country, "cities": cities, "label": cities.index(right)}


def _write(folder: Path, name: str, task: str, rows: list[dict[str, object]]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(task.lstrip().format(data=json.dumps(str(data))))


if __name__ == "__main__":
    main()
