"""Placeholders that become the tokens of images, and where these stand."""

import pytest

from vllm_mp.client.images.placement import ImageTokens, cut, expand_ids, expand_text, place
from vllm_mp.requests.images import PlacedImage

A, B = ImageTokens(b"a", "(<i><i>|<i>)", 3), ImageTokens(b"b", "<i>", 1)
IMAGE = 9


def test_placeholders_are_replaced_in_their_order():
    assert expand_text("x<i>y<i>", "<i>", [A, B]) == "x(<i><i>|<i>)y<i>"
    assert expand_ids([1, 9, 2, 9], IMAGE, "<i>", [[9, 9, 5, 9], [9]]) == [1, 9, 9, 5, 9, 2, 9]


@pytest.mark.parametrize(
    ("text", "images", "said"),
    [
        ("x", [A], r"0 times '<i>' for 1 images; write '<i>' once for each image"),
        ("<i><i>", [A], "2 times '<i>' for 1 images; give an image for each"),
        ("<i>", [A, B], "1 times '<i>' for 2 images; write"),
    ],
)
def test_prompt_with_another_number_of_placeholders_than_images_is_refused(text, images, said):
    with pytest.raises(ValueError, match=said):
        expand_text(text, "<i>", images)
    with pytest.raises(ValueError, match=said):
        expand_ids([IMAGE] * text.count("<i>"), IMAGE, "<i>", [[]] * len(images))


def test_runs_of_image_tokens_belong_to_the_images_in_order():
    assert place([1, 9, 9, 5, 9, 9, 2], IMAGE, [A, B]) == [
        PlacedImage(b"a", [(1, 2), (4, 1)]),
        PlacedImage(b"b", [(5, 1)]),
    ]
    with pytest.raises(ValueError, match="2 image tokens of the prompt, and its images have 3"):
        place([9, 9], IMAGE, [A])


def test_truncation_leaves_out_whole_images_and_cuts_none():
    placed = [PlacedImage(b"a", [(1, 2), (4, 1)]), PlacedImage(b"b", [(6, 1)])]
    assert cut(placed, 0) == placed
    assert cut(placed, 1)[0].spans == [(0, 2), (3, 1)]
    assert cut(placed, 5) == [PlacedImage(b"b", [(1, 1)])]
    for num_removed in (2, 3, 4):
        with pytest.raises(ValueError, match="would cut through image 1 of the prompt"):
            cut(placed, num_removed)
