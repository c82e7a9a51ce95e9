"""tools/quality/structured_output_suite.py on a small suite."""

import json
import runpy

SUITE = [
    {
        "description": "held",
        "schema": {"type": "integer"},
        "tests": [{"data": 3, "valid": True}, {"data": "a", "valid": False}],
    },
    {"description": "refused", "schema": {"uniqueItems": True}, "tests": [{"data": [1, 1], "valid": False}]},
    {
        "description": "not held, because no grammar knows the calendar",
        "schema": {"type": "string", "format": "date"},
        "tests": [{"data": "2021-02-29", "valid": False}],
    },
]


def test_schemas_and_instances_are_counted(tmp_path, default_model, capsys):
    (tmp_path / "suite.json").write_text(json.dumps(SUITE))
    main = runpy.run_path("tools/quality/structured_output_suite.py")["main"]
    assert main([str(tmp_path), "--model", str(default_model), "--show", "5"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "schemas accepted 2 of 3 (66.7 %)" in printed
    assert "no invalid instance allowed 1 of 3 (33.3 %)" in printed
    assert "valid instances allowed 1 of 1 (100.0 %)" in printed
    assert "invalid instances refused 1 of 2 (50.0 %)" in printed
    assert "unsupported keywords: 'uniqueItems'" in printed
    assert "not held" in printed
