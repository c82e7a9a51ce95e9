"""The images of conversations, and what chat templates get in their place."""

import asyncio

import pytest
from support.image_models import IMAGE_TOKEN, PARTS_TEMPLATE, image_tokenizer, picture

from vllm_mp.client.prompts.chat_images import take_images
from vllm_mp.client.prompts.chat_messages import ChatMessageError
from vllm_mp.client.prompts.chat_template import ChatTemplate, ChatTemplateError

TEXTS_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
BOTH_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}[{{ message['content'] }}]{% else %}"
    "{% for part in message['content'] %}{% if part.type == 'image' %}<image>{% else %}({{ part.text }})"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
SORTING_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %} <image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %} {{ part['text'] }}{% endgeneration %}{% endfor %}{% endfor %}"
)
"""A template that writes the images before the texts, as that of LLaVA 1.5."""
CAT = picture(2, 2)
URL = {"type": "image_url", "image_url": {"url": "data:,cat"}}
PIL = {"type": "image_pil", "image_pil": CAT}


def text(value):
    return {"type": "text", "text": value}


def rendered(template, *messages, image_token=IMAGE_TOKEN, tools=None):
    taken, images = take_images(messages)
    rendering = ChatTemplate(image_tokenizer(), image_token=image_token).render(
        taken, template=template, has_images=bool(images), tools=tools
    )
    return asyncio.run(rendering), [image.value for image in images]


def user(*content):
    return {"role": "user", "content": list(content)}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS_TEMPLATE, "system:Be brief.\nuser:See <image> and <image>a\nb\n"),
        (TEXTS_TEMPLATE, "system: Be brief.\nuser: See \n<image>\n and \n<image>\na\nb\n"),
        (BOTH_TEMPLATE, "(Be brief.)(See )<image>( and )<image>(a\nb)"),
        (SORTING_TEMPLATE, "system: Be brief.user: <image> <image> See   and  a\nb"),
    ],
    ids=["parts", "texts", "both", "sorting"],
)
def test_template_gets_images_where_they_stand(template, expected):
    system = {"role": "system", "content": "Be brief."}
    conversation = user(text("See "), URL, text(" and "), PIL, text("a"), text("b"))
    assert rendered(template, system, conversation) == (expected, ["data:,cat", CAT])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS_TEMPLATE, "user:Hello\nassistant:a\nb\n"),
        (TEXTS_TEMPLATE, "user: Hello\nassistant: a\nb\n"),
        (BOTH_TEMPLATE, "[Hello][a\nb]"),
        (SORTING_TEMPLATE, "user: Helloassistant: a\nb"),
    ],
    ids=["parts", "texts", "both", "sorting"],
)
def test_conversation_without_images_has_the_form_that_its_template_reads(template, expected):
    answer = {"role": "assistant", "content": [text("a"), text("b")]}
    assert rendered(template, {"role": "user", "content": "Hello"}, answer) == (expected, [])


def test_tools_are_described_beside_images():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    prompt, _ = rendered(PARTS_TEMPLATE, user(PIL, text("What?")), tools=[tool])
    assert prompt.startswith("system:You can call functions.")
    assert prompt.endswith("user:<image>What?\n")


def test_other_names_of_an_image_are_read():
    parts = [
        {"type": "input_image", "image_url": "data:,a"},
        {"type": "image_url", "image_url": "data:,b"},
        {"type": "image", "image": CAT, "uuid": "cat"},
        {"type": "image_url", "image_url": None, "uuid": "cat"},
    ]
    images = take_images([user(*parts)])[1]
    assert [image[1:] for image in images] == [("data:,a", None), ("data:,b", None), (CAT, "cat"), (None, "cat")]


@pytest.mark.parametrize(
    ("part", "path", "said"),
    [
        ({"type": "image_url"}, "messages[1].content[1].image_url", "must hold a URL, got None"),
        ({"type": "image_url", "image_url": {"url": 3}}, "messages[1].content[1].image_url", "must hold a URL, got 3"),
        ({"type": "image_url", "uuid": ""}, "messages[1].content[1].uuid", "1 to 1024 characters, got 0"),
        ({"type": "image_pil", "image_pil": b"x"}, "messages[1].content[1].image_pil", "image of Pillow, got bytes"),
    ],
)
def test_part_without_an_image_is_refused_with_its_place(part, path, said):
    with pytest.raises(ChatMessageError, match=said) as caught:
        take_images([user(text("x")), user(text("y"), part)])
    assert caught.value.path == path


def test_model_without_images_refuses_them():
    with pytest.raises(ChatTemplateError, match="takes no images"):
        rendered(TEXTS_TEMPLATE, user(PIL), image_token=None)
