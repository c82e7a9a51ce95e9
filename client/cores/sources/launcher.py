"""The source of cores that are processes of this client."""

import contextlib
import logging
import os
import secrets
import shutil
import time
from pathlib import Path

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.health import HangWatch, count_oom_kills
from vllm_mp.client.cores.sources.core_source import (
    Check,
    Core,
    ServedModel,
    limit_changes,
    load_progress,
    model_limits,
)
from vllm_mp.client.cores.sources.handover import Estate, Inheritance, Offer, wait_until
from vllm_mp.client.cores.sources.held_address import HeldAddress
from vllm_mp.client.cores.sources.kept_cache_files import KeptCacheFiles
from vllm_mp.client.cores.sources.process import CoreProcess, Templates
from vllm_mp.client.cores.sources.runtime_folder import make_folder, own_folder
from vllm_mp.client.cores.sources.template import TEMPLATE, CoreTemplate
from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import is_missing_node, prepare_node_0
from vllm_mp.core_link.core_launch import KeptCache, Predecessor
from vllm_mp.core_link.core_status import NOT_SUSPENDED, CoreState
from vllm_mp.core_link.status_page import MAX_TRIED, StatusPage
from vllm_mp.errors import EngineStartError
from vllm_mp.keys.operator_key import new_operator_key
from vllm_mp.model_store.gguf import hold_folder, mapped_gguf
from vllm_mp.requests.lora_request import AdapterRecord

logger = logging.getLogger(__name__)

_ORPHAN_TIMEOUT_S = 15.0
"""Time that a core whose parent was killed gets to end."""
_AHEAD_DELAY_S = 2.0
"""Time from the start of a core until the next one is forked ahead: the core first answers what waits for it."""
_AHEAD_RETRY_S = 30.0
"""Time from the end of a process that was forked ahead until the next one is."""
_PLACES = frozenset({"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"})
"""Variables that bind OpenMP's threads to CPUs."""


class CoreLauncher:
    """Starts cores as processes of this client, with their files in one private folder, which `close` removes."""

    node = None
    """Only a core on Ray has a node."""

    def __init__(
        self,
        config: VllmConfig,
        operator_key: bytes | None = None,
        has_log_files: bool = True,
        folder: Path | None = None,
    ) -> None:
        """Clients with `operator_key` are operators of the cores; None: only this process is, empty: there are none.

        Without `has_log_files` the cores write their logs to the standard error of this process. `folder` is a result
        of `make_folder`; None: another one. Raises ValueError if the ranks are on several machines, and the core is not
        on this one or no keys can be made.
        """
        if config.parallel_config.nnodes > 1 and config.parallel_config.data_parallel_backend != "ray":
            logger.info("the core needs its other machines: %s", prepare_node_0(config))
        self._config = config
        self._has_log_files = has_log_files
        self._limits = config.liveness_config
        self._owner = os.getpid()
        self._public: HeldAddress | None = None
        self._first_incarnation = 1
        self._num_started = 0
        self._oom_kills = 0
        """Kills for want of memory before the latest core was started."""
        self.predecessor: Predecessor | None = None
        """The latest core that has served, if it died; the next core is told of it."""
        self._operator_key = new_operator_key() if operator_key is None else operator_key
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._suspension = NOT_SUSPENDED
        """The pause and the sleep that the next core must enter."""
        self._adapters: list[AdapterRecord] | None = None
        """The LoRA adapters that the next core must know; None before a core has known any."""
        self._tried: dict[bytes, None] = {}
        """The digests of the constraints that the next core compiles without a trial, the earliest first."""
        self._cache = KeptCacheFiles(config)
        self._held_folders = [held for model in config.models if (held := hold_folder(model.folder)) is not None]
        """Descriptors that keep `folder`, and the folders of the models, which the next core reads."""
        self._process: CoreProcess | None = None
        self._connection: CoreConnection | None = None
        self._standby: CoreProcess | None = None
        """A process that waits until it becomes the core: forked ahead, or to replace the core."""
        self._ahead_at = 0.0
        """When a process may be forked ahead, in seconds of `time.monotonic()`."""
        self._inheritance: Inheritance | None = None
        """The process from which this one takes over; None once it has, or if there is none."""
        self._has_let_go = False
        """Another process has taken over."""
        self._template = TEMPLATE if _uses_template(config) else None
        if self._template is not None:
            self._template.join()
        self._model_template: CoreTemplate | None = None
        """Forks cores with the model of the latest core; None: nothing does."""
        self._former_template: CoreTemplate | None = None
        """The one before, which `clear_up` ends; None: there is none."""
        self._former: CoreProcess | None = None
        """The core that was discarded last, if it may not have ended yet."""
        # At the end, so that an interrupt in the lines before leaves no folder behind.
        self.folder = folder or make_folder()
        if (owned := own_folder(self.folder)) is not None:
            self._held_folders.append(owned)

    @property
    def standby_pid(self) -> int | None:
        """The process id of the standby; None if there is none."""
        return self._standby.pid if self._standby is not None else None

    def share(self, address: str | None, key_file: str | None) -> str:
        """Let other clients connect to all cores at `address`, by default in the private folder; return the address.

        Call this before the first core starts. Raises ValueError as `HeldAddress` does.
        """
        self._public = HeldAddress(address or f"ipc://{self.folder}/core.sock", key_file)
        # Clients may know a core of another parent at the address.
        self._first_incarnation = int(1000 * time.time())
        return self._public.address

    def inherit_from(self, inheritance: Inheritance, key_file: str | None) -> str:
        """Take over the address of another process's cores, and later its core, by `take_over`; return the address.

        Call this before the first core starts. Raises ValueError if `key_file` is missing, or if this launcher's model
        is not that of the core.
        """
        offer, descriptors = inheritance.offer, inheritance.descriptors
        own = {name: value for name, value in _as_text(self._config).items() if value != "auto"}
        if different := limit_changes({name: offer.limits[name] for name in own}, own):
            raise ValueError(f"cannot take over {offer.address} with {', '.join(different)}: give the same options")
        self._public = HeldAddress.inherited(offer.address, key_file, descriptors[: offer.num_held])
        self._cache.close()
        self._cache = KeptCacheFiles(self._config, descriptors[offer.num_held :])
        self._first_incarnation = max(int(1000 * time.time()), offer.incarnation + 1)
        self._inheritance = inheritance
        return offer.address

    def take_over(self, check: Check) -> None:
        """Load the model, and then let the other process's core end; no-op without one. `begin` must follow.

        If that process ends meanwhile, wait for the end of its core. Raises EngineStartError, with the cause, if the
        model cannot be loaded or that process goes on, and what `check` raises; then that core goes on.
        """
        if self._inheritance is None:
            return
        self.load_standby()
        trouble = "the process that was to take over has not loaded the model"
        wait_until(self.has_loaded_standby, check, self._limits.start_timeout_s, trouble)
        estate = self._inheritance.claim(check)
        if estate is None:
            core = Path(f"/proc/{self._inheritance.core_pid}")
            wait_until(lambda: not core.exists(), check, _ORPHAN_TIMEOUT_S, "the core before has not ended")
            self._inheritance.close()
            self._inheritance = None
            return
        self.predecessor, self._suspension = estate.predecessor, estate.suspension
        self._adapters, self._tried = estate.adapters, dict.fromkeys(estate.tried)

    def confirm(self, core: Core, check: Check) -> None:
        """Let the other process end, and then `core` serve; no-op without such a process.

        Raises EngineStartError if `core` has another model than the core before, or if the other process has taken its
        core back, and what `check` raises; then the other process goes on.
        """
        if self._inheritance is None:
            return
        assert core.process is not None
        assert self._public is not None
        assert self.predecessor is not None
        offer = self._inheritance.offer
        former = ServedModel(self.predecessor.model, offer.limits)
        try:
            if different := former.changes(ServedModel(core.digest, _as_text(core.config)), with_tokenizer=True):
                differ = ", ".join(different)
                raise EngineStartError(f"cannot take over {offer.address} with {differ}: give the same model")
            self._inheritance.confirm(check)
        except BaseException:
            core.connection.close()
            core.process.kill()
            self.discard(core.process)
            raise
        self._inheritance = None
        self._public.note_owner()
        self._cache.keep_writing()
        core.process.let_serve()

    def offer(self, core: Core) -> tuple[Offer, list[int]]:
        """Return what a process gets that asks to take over, and the descriptors for it."""
        assert self._public is not None
        held = self._public.descriptors
        offer = Offer(
            address=self._public.address,
            incarnation=core.connection.incarnation,
            core_pid=core.welcome.pid,
            limits=_as_text(core.config),
            num_held=len(held),
        )
        return offer, [*held, *self._cache.inherited]

    def estate(self) -> Estate:
        """Return what the latest core has left, which must have ended and been discarded."""
        assert self.predecessor is not None
        self._cache.stop_writing()  # the other process does
        return Estate(
            predecessor=self.predecessor,
            suspension=self._suspension,
            adapters=self._adapters,
            tried=list(self._tried),
        )

    def let_go(self) -> None:
        """Leave the address and its files to the process that has taken over."""
        assert self._public is not None
        self._public.let_go()
        self._public = None
        self._has_let_go = True

    def begin(self) -> None:
        """Start a core, or make the standby the core; `finish` waits for it.

        Raises OSError if no process can start, and ValueError if the cores' address was taken away.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        if self._public is not None and self._public.restore():
            self._stop_standby()  # it has inherited the socket that was removed
        self._num_started += 1
        self._oom_kills = count_oom_kills()
        if self._standby is not None and not self._may_become_core(self._standby):
            self.end_standby()
        self._process, self._standby = self._standby, None
        if self._process is None:
            self._process = self._start(self._num_started)
        self._keep_model_template(self._process.model_template)
        self._launch(
            self._process,
            self._num_started,
            self._cache.for_successor_of(self.predecessor, writes=self._inheritance is None),
            serves_later=self._inheritance is not None,
        )
        self._connection = CoreConnection(self._process.address, None, self._operator_key, self._token)

    def _launch(
        self,
        process: CoreProcess,
        number: int,
        kept_cache: KeptCache | None,
        *,
        waits: bool = False,
        serves_later: bool = False,
    ) -> None:
        process.launch(
            self._config,
            self._operator_key,
            number,
            self._suspension,
            self.predecessor,
            self._adapters,
            list(self._tried),
            kept_cache,
            waits=waits,
            serves_later=serves_later,
        )

    def finish(self, check: Check) -> Core:
        """Wait until the core that `begin` started serves.

        Raises EngineStartError, with the cause, if it does not start, and what `check` raises. In both cases the core
        is ended, and of its files only the log is left.
        """
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        hang = HangWatch(self._limits.engine_iteration_timeout_s, process.pid)

        def look() -> None:
            check()
            if not process.is_alive():
                raise EngineStartError(f"the engine did not start: {process.describe_end(log_stays=False)}")
            if hang.is_stopped_for_too_long():
                raise EngineStartError(
                    f"the engine did not start: a signal stopped its process {process.pid}; start it again"
                )

        try:
            timeout = self._limits.start_timeout_s
            welcome, config = connection.greet(timeout, look, lambda: load_progress(process.status_page()))
        except BaseException as error:
            if isinstance(error, EngineStartError) and (core := self._core_that_served(process, connection)):
                self._process = self._connection = None
                return core
            connection.close()
            if process.was_killed and count_oom_kills() == self._oom_kills:
                self._cache.excuse_successor()
            else:
                self._keep_model_template(None)  # what has failed may be its memory
            process.kill()
            self.discard(process)
            raise
        self._process = self._connection = None
        self._ahead_at = time.monotonic() + _AHEAD_DELAY_S
        if self._public is not None:
            connection.send(wire.Bye(welcome.incarnation))  # the parent of a shared core is not a client
        return Core(connection, welcome.client, config, process.status_page(), process, welcome)

    def _core_that_served(self, process: CoreProcess, connection: CoreConnection) -> Core | None:
        """Return a shared core that died before it greeted its parent, but when clients could find it; else None.

        Its successor must know what it was computing for them.
        """
        page = None if self._public is None or process.is_alive() else process.status_page()
        if page is None:
            return None
        if page.read().state not in (CoreState.IDLE, CoreState.STEPPING):
            return None
        connection.incarnation = process.incarnation
        last_death = None if self.predecessor is None else self.predecessor.last_death(b"")
        welcome = wire.welcome(process.incarnation, -1, process.pid, b"", last_death)
        return Core(connection, -1, self._config, page, process, welcome)

    def prepare_template(self) -> None:
        """Keep the template process with the imports, if `core_template` is set, and a process that is forked ahead.

        Raises OSError if none can start.
        """
        if self._template is not None:
            self._template.prepare()
            self._fork_ahead()

    def _fork_ahead(self) -> None:
        """Keep a standby that the template with the model has forked, so that the next core need not even be forked.

        It shares the memory of the template, and ends with it, such as when the core gives up its weights in a sleep.
        """
        is_ready = self._model_template is not None and self._model_template.is_ready()
        if self._standby is not None:
            if not (is_ready and self._standby.is_alive()):
                self.end_standby()
                self._ahead_at = time.monotonic() + _AHEAD_RETRY_S
        elif is_ready and time.monotonic() > self._ahead_at:
            self._start_standby()

    def _may_become_core(self, standby: CoreProcess) -> bool:
        """Return whether `standby` lives and, if it was forked ahead, its template too.

        The core has ended the template if it gave up its weights, and may have loaded others since.
        """
        template = self._model_template
        if template is not None and standby.model_template is template and not template.is_ready():
            return False
        return standby.is_alive()

    def load_standby(self) -> None:
        """Start a standby, from the files as they are now, that loads the model beside the core.

        Raises OSError if no process can start.
        """
        self._stop_standby()
        self._start_standby(forks=False)

    def _start_standby(self, *, forks: bool = True) -> None:
        number = self._num_started + 1
        process = self._start(number, forks=forks, is_standby=True)
        self._launch(process, number, self._cache.for_replacement(), waits=True)
        self._standby = process

    def has_loaded_standby(self) -> bool:
        """Return whether the standby of `load_standby` has loaded the model; raises EngineStartError if it ended."""
        standby = self._standby
        if standby is None:
            raise EngineStartError("there is no standby any more")
        if standby.is_alive():
            return standby.is_waiting()
        cause = standby.describe_end(log_stays=False)
        self.end_standby()
        raise EngineStartError(f"the process that was to replace the core did not start: {cause}")

    def check_standby(self, core: Core) -> None:
        """Raise EngineStartError if the standby of `load_standby` has loaded another model than `core` serves."""
        assert self._standby is not None
        loaded = core.model._replace(digest=self._standby.waiting_model())
        if changes := core.model.changes(loaded, with_tokenizer=False):
            raise EngineStartError(
                f"the process that was to replace the core has {', '.join(changes)}, because the model's files have "
                "changed; put the former files back, start the engine again, or have the weights loaded by "
                "sleep(level=2) and wake_up()"
            )

    def end_standby(self) -> None:
        """End the standby, if there is one, and remove its files."""
        standby = self._standby
        if standby is not None:
            standby.kill()
            self._stop_standby()
            standby.remove_files()

    def _stop_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.stop()
            if standby.model_template is not None and standby.model_template is not self._model_template:
                standby.model_template.leave()

    def _keep_model_template(self, template: CoreTemplate | None) -> None:
        """Let `template` fork the next cores; `clear_up` ends the former one."""
        former, self._model_template = self._model_template, template
        if former is not None and former is not template:
            if self._former_template is not None:
                self._former_template.leave()
            self._former_template = former

    def renew_template(self) -> None:
        """Let the next cores be forked from a template that has imported the files as they are now."""
        if self._template is not None:
            self._template.renew()

    def _start(self, number: int, *, forks: bool = True, is_standby: bool = False) -> CoreProcess:
        """Start the process of core `number`, which is a new interpreter in any case without `forks`.

        Raises OSError if the system cannot.
        """
        # No template has the shares of several ranks.
        keeps_model = self._template is not None and self._config.parallel_config.world_size == 1
        templates = Templates(keeps_model=keeps_model, is_standby=is_standby)
        if forks:
            templates = templates._replace(with_imports=self._template, with_model=self._model_template)
        return CoreProcess(
            self.folder,
            self._first_incarnation + number - 1,
            self._public,
            self._has_log_files,
            self._cache.inherited,
            templates,
        )

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """No-op: the status page says what the next core must know."""

    def lasting_error(self, error: str) -> str | None:
        """Return why no further core can serve, after a core did not start because of `error`; None if one may.

        A model's GGUF file is missing, changed or damaged, or a machine has not come back in time.
        """
        try:
            for model in self._config.models:
                mapped_file = mapped_gguf(model.folder)
                if mapped_file is not None:
                    mapped_file.read()
        except ValueError as model_error:
            return f"no further core can load the model: {model_error}"
        return f"the next core cannot start: {error}" if is_missing_node(error) else None

    def inherit(self, page: StatusPage) -> None:
        """Let the first core enter the pause and the sleep of the core of `page`, and know the same adapters."""
        self._suspension = page.read().suspension._replace(num_draining=0)
        self._adapters = page.adapters()

    def discard(self, process: CoreProcess) -> None:
        """Remove the files of a core that has ended, except its log; also remove the logs of its predecessors.

        A core that was killed may still be ending: `clear_up` waits for that. The next core will enter the pause and
        the sleep that were in force, and know the same adapters and tried constraints.
        """
        self._wait_for_end_of_former()
        self._former = process
        if process.lost_a_mapped_file:
            # They map the same file: the next core looks at it.
            self._keep_model_template(None)
            self.end_standby()
        self._cache.note_end(self.predecessor)
        page = process.status_page()
        if page is not None:
            suspension = page.read().suspension
            if suspension.generation >= self._suspension.generation:  # else the core died before it had entered any
                self._suspension = suspension
            adapters = page.adapters()
            if adapters is not None:
                self._adapters = adapters
            tried = [*self._tried, *page.tried()]
            self._tried = dict.fromkeys(tried[-MAX_TRIED:])
        process.remove_files()
        try:
            logs = list(self.folder.glob("core-*.log"))
        except OSError as error:  # such as no free file descriptor; the next call removes them
            logger.warning("cannot remove the logs of earlier cores yet: %s", error)
            return
        for log in logs:
            number = int(log.stem.removeprefix("core-"))
            if number < process.incarnation:
                with contextlib.suppress(OSError):
                    log.unlink()

    def is_outlived_by_cache(self, core: Core) -> bool:
        """Whether the KV cache outlives `core`, so that its successor needs none of the memory that it gives back."""
        return bool(self._cache.inherited) and core.config.device_config.device == "cpu"

    def clear_up(self) -> None:
        """End what earlier cores have left: the process of the latest, and a template with its model; idempotent.

        The system may take long to take back their memory, so this comes after the start of the next core.
        """
        self._wait_for_end_of_former()
        former, self._former_template = self._former_template, None
        if former is not None:
            former.leave()

    def _wait_for_end_of_former(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            former.stop()

    def close(self, timeout: float | None, core: Core | None) -> None:
        """End `core`, a core that starts and the standby, by force after `timeout` seconds; remove the folder."""
        if os.getpid() != self._owner:
            return
        if self._connection is not None:
            self._connection.close()
        for process in (self._process, self._standby, core and core.process):
            if process is not None:
                process.stop(timeout)
                if not self._has_let_go:  # else the page is that of another process's core
                    process.remove_files()
        self._stop_standby()
        self._keep_model_template(None)
        self.clear_up()
        if self._template is not None:
            self._template.leave()
            self._template = None
        if self._public is not None and self._inheritance is None:
            self._public.close()
        elif self._public is not None:
            self._public.let_go()  # the other process goes on there
        if self._inheritance is not None:
            if self._public is None:
                for descriptor in self._inheritance.descriptors:
                    os.close(descriptor)
            self._inheritance.close()
        self._cache.close(goes_on=self._has_let_go or self._inheritance is not None)
        while self._held_folders:
            os.close(self._held_folders.pop())
        shutil.rmtree(self.folder, ignore_errors=True)


def _as_text(config: VllmConfig) -> dict[str, str]:
    """Return `model_limits` as text."""
    return {name: str(value) for name, value in model_limits(config).items()}


def _uses_template(config: VllmConfig) -> bool:
    """Return whether the cores of `config` can be forked from a template process, and its options do not forbid it."""
    limits = config.liveness_config
    if not (limits.recovery and limits.core_template):
        return False
    # OpenMP chooses the places of its threads when it is imported, before a fork limits its CPUs.
    return not config.device_config.cpus or _PLACES.isdisjoint(os.environ)
