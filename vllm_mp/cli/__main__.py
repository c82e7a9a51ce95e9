import sys

from vllm_mp.cli import main

sys.exit(main())
