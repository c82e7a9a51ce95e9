"""instructor, by a call, a JSON schema, a response, and in parts of a stream."""

import instructor
import openai
import pydantic
from checks import BASE_URL, JOBS, KEY, MODEL, TEXT, check, run

MESSAGES = [{"role": "user", "content": TEXT}]


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    job: JOBS


def person(mode: instructor.Mode) -> Person:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY), mode=mode)
    return client.create(model=MODEL, response_model=Person, messages=MESSAGES)


for chosen in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    check(chosen.name)(lambda chosen=chosen: person(chosen))


@check("stream of parts")
def partial() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY))
    *_, last = client.create_partial(model=MODEL, response_model=Person, messages=MESSAGES)
    assert last.job in ("baker", "teacher")


run()
