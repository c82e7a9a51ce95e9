"""What is left of a core that has ended, and what the next core is told of it."""

from types import SimpleNamespace

from support.descriptors import no_free_descriptor

from vllm_mp import EngineArgs
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.core_link.core_status import NOT_SUSPENDED
from vllm_mp.core_link.status_page import StatusPage


def test_pause_of_a_core_that_dies_while_no_file_descriptor_is_free_goes_on(default_model, caplog):
    launcher = CoreLauncher(EngineArgs(model=str(default_model)).create_engine_config())
    try:
        page = StatusPage.create(None, 2)
        suspension = NOT_SUSPENDED._replace(pause="keep", generation=1)
        page.note_suspension(suspension)
        process = SimpleNamespace(
            incarnation=2,
            lost_a_mapped_file=False,
            status_page=lambda: page,
            remove_files=lambda: None,
            stop=lambda: None,
        )
        old_log = launcher.folder / "core-1.log"
        old_log.touch()
        with no_free_descriptor():
            launcher.discard(process)
        assert launcher._suspension == suspension
        assert "cannot remove the logs of earlier cores yet: " in caplog.text
        launcher.discard(process)
        assert not old_log.exists(), "the next call removes it"
    finally:
        launcher.close(None, None)
