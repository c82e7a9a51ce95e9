"""The file of an operator key: made private, and refused if it is not."""

import os

import pytest

from vllm_mp.keys.operator_key import ensure_operator_key, read_operator_key


def test_key_file_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "operators"
    key = ensure_operator_key(path)
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert ensure_operator_key(path) == read_operator_key(path) == key
    assert ensure_operator_key(tmp_path / "others") != key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_key_file_that_another_user_may_read_or_change_is_refused(tmp_path, mode):
    path = tmp_path / "operators"
    ensure_operator_key(path)
    path.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"operators can be read or written by other users \(mode {mode:o}.*chmod 600"
    ):
        read_operator_key(path)


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "xy" * 32, "\udcff"])
def test_file_without_a_key_is_refused_by_name(tmp_path, text):
    path = tmp_path / "operators"
    path.write_text(text, errors="surrogateescape")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="operators does not hold a key of 64 hexadecimal digits"):
        read_operator_key(path)


def test_path_that_cannot_be_read_or_made_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read operator key file .*missing"):
        read_operator_key(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"cannot make operator key file .*operators"):
        ensure_operator_key(os.path.join(tmp_path, "missing", "operators"))
