"""`python -m vllm_mp.core`: one core process, which reads its launch line on standard input.

With `--worker` it is another rank of a core, with `--rank-host` it runs the ranks of another machine (`core.parallel`).
With `--template` it forks cores, which continue here, and with `--leave-template=DESCRIPTOR` it forks such a process
before it becomes a core (`core.template`). As a `--standby` of another core, and as a template without `--awaited`, it
imports everything at a low priority.
"""

import logging
import os
import sys

from vllm_mp.core.temporary_folder import settle_temporary_folder

settle_temporary_folder()
if "--template" in sys.argv[1:]:
    from vllm_mp.core.core_imports import import_core
    from vllm_mp.core.template import run_template
    from vllm_mp.machine.loading_thread import BESIDE_A_CORE

    run_template(import_core, niceness=0 if "--awaited" in sys.argv[1:] else BESIDE_A_CORE)
elif leaving := [argument for argument in sys.argv[1:] if argument.startswith("--leave-template=")]:
    from vllm_mp.core.core_imports import import_core
    from vllm_mp.core.template import leave_template

    leave_template(int(leaving[0].partition("=")[2]), import_core)
elif "--standby" in sys.argv[1:]:
    from vllm_mp.core.core_imports import import_core
    from vllm_mp.core.sibling_fork import end_idle_threads
    from vllm_mp.machine.loading_thread import BESIDE_A_CORE, run_in_thread

    run_in_thread(import_core, niceness=BESIDE_A_CORE)
    end_idle_threads()  # else they would keep their priority
if "--worker" in sys.argv[1:]:
    from vllm_mp.core.parallel.worker_main import main
elif "--rank-host" in sys.argv[1:]:
    from vllm_mp.core.parallel.rank_host import main
else:
    from vllm_mp.core.process import main

exit_code = main()
logging.shutdown()
# Everything is closed. The usual exit would destroy torch's objects for half a second while the parent waits.
os._exit(exit_code)
