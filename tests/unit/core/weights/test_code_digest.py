"""Which code the prefix cache file depends on."""

from vllm_mp.core.weights.code_digest import code_digest, code_files
from vllm_mp.kernels.cpu.library import library


def test_code_of_models_weights_and_kernels_is_in_the_digest(monkeypatch, tmp_path):
    names = {"/".join(path.parts[-2:]) for path in code_files()}
    assert {"models/llama.py", "weights/digest.py", "kernels/ops.py"} <= names
    assert library() is None or library().path in code_files()
    file = tmp_path / "model.py"
    found = []
    for text in ("a", "b", "a"):
        file.write_text(text)
        monkeypatch.setattr("vllm_mp.core.weights.code_digest.code_files", lambda: [file])
        code_digest.cache_clear()
        found.append(code_digest())
    code_digest.cache_clear()
    assert found[0] == found[2] != found[1]
