"""The template process that has the model of a core."""

from vllm_mp import AsyncLLM
from vllm_mp.client.cores.sources.template import CoreTemplate
from vllm_mp.testing.engines import eventually


async def model_template_of(engine: AsyncLLM) -> CoreTemplate:
    """Return the template process with the model of the first core, once it can fork the next one."""
    template = engine.cores.first.supervisor.core.process.model_template

    async def is_ready() -> bool:
        template.prepare()
        return template.pid is not None

    await eventually(is_ready)
    return template
