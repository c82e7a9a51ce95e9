"""The images that a core keeps for its clients, and where they stand in requests."""

import pytest
import torch

from vllm_mp.core.images.image_store import _FRESH_BYTES, ImageStore, StoredImage
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage
from vllm_mp.testing.image_models import IMAGE_TOKEN, make_image_model
from vllm_mp.validation.image_validation import ImageShape


def image(number, content=None):
    data = (number if content is None else content).to_bytes(2, "little")
    return ProcessedImage(number.to_bytes(32, "little"), [ImageArray("pixel_values", "uint8", [2], data)])


def placed(number, *spans):
    return PlacedImage(number.to_bytes(32, "little"), [*spans])


def make_store(limit=2 * _FRESH_BYTES, token_bytes=2**27):
    """Return a store whose images have two tiles of a token each, and so take 256 MiB."""
    return ImageStore(lambda _: ImageShape(2, 1), token_bytes, limit)


def test_client_that_has_most_loses_the_image_that_it_used_least_recently():
    store = make_store()
    store.put(1, image(0))
    for number in range(6):
        store.put(2, image(number))
    store.find(2, [placed(0, (0, 2))])
    store.put(2, image(6))
    assert store.num_images == 7
    assert not store.find(1, [placed(0, (0, 2))])[1]
    assert store.find(2, [placed(number, (0, 2)) for number in (0, 1, 2)])[1] == [image(1).digest]


def test_other_clients_do_not_find_an_image_by_its_digest():
    store = make_store()
    store.put(1, image(0))
    assert store.find(2, [placed(0, (0, 2))]) == ([], [image(0).digest])
    store.drop_client(1)
    assert store.find(1, [placed(0, (0, 2))])[1]
    assert store.num_images == 0


def test_without_a_limit_an_image_is_kept_as_long_as_requests_hold_it():
    store = make_store(limit=0)
    store.put(1, image(0))
    request = [placed(0, (0, 2)), placed(0, (2, 2))]
    [first, second], _ = store.find(1, request)
    assert first is second
    [third, _], _ = store.find(1, request)
    assert third is first
    assert store.num_images == 0
    del first, second, third
    assert store.find(1, request)[1] == [image(0).digest]


def test_reset_forgets_images_that_requests_hold():
    store = make_store()
    store.put(1, image(0))
    held, _ = store.find(1, [placed(0, (0, 2))])
    store.clear()
    assert store.find(1, [placed(0, (0, 2))])[1] == [image(0).digest]
    assert held[0].num_tokens == 2


def test_image_larger_than_all_limits_is_kept_for_its_request():
    store = make_store(token_bytes=_FRESH_BYTES)
    store.put(1, image(0))
    store.put(1, image(1))
    assert store.find(1, [placed(1, (0, 2))])[0]
    assert store.num_images == 1


def test_keys_are_those_of_the_tiles_that_are_asked_for():
    array = ImageArray("pixel_values", "uint8", [3, 2], bytes([1, 2, 1, 2, 3, 4]))
    stored = StoredImage(ProcessedImage(bytes(32), [array]), ImageShape(3, 2), 4)
    assert stored.keys(1, 2) == stored.keys(2, 4) == stored.keys(3, 4) != stored.keys(4, 6)
    assert stored.keys(1, 5) == stored.keys(0, 1) + stored.keys(2, 3) + stored.keys(4, 5)
    before = stored.keys(0, 6)
    for tile in range(3):
        stored.note_encoded(tile, torch.zeros(2, 1))
    assert stored.keys(0, 6) == before


def test_embeddings_are_those_of_the_encoded_tiles():
    stored = StoredImage(image(0), ImageShape(4, 3), 4)
    assert [stored.missing_tile(first, last) for first, last in ((4, 5), (0, 4), (2, 11), (9, 12))] == [1, 0, 0, 3]
    for tile in (1, 0, 3, 2):
        assert stored.missing_tile(3 * tile, 12) == tile
        assert stored.processed.arrays
        stored.note_encoded(tile, torch.arange(3 * tile, 3 * tile + 3)[:, None].float())
    assert stored.missing_tile(0, 12) is None
    for first, last in ((4, 5), (0, 4), (2, 11), (0, 12), (3, 7)):
        assert torch.cat(stored.embeddings(first, last)).flatten().tolist() == list(range(first, last))


def request_images(*each, num_tokens=20, contents=(0, 1, 2)):
    store = make_store(token_bytes=8)
    for number, content in enumerate(contents):
        store.put(1, image(number, content))
    return RequestImages(each, store.find(1, each)[0], num_tokens)


def test_tokens_have_the_embeddings_of_their_image_in_order():
    images = request_images(placed(0, (3, 1), (5, 1)), placed(1, (6, 2)))
    found = [(part.position, part.offset, part.num_tokens) for part in images.parts(4, 7)]
    assert found == [(5, 1, 1), (6, 0, 1)]
    assert images.overlaps(7, 8)
    assert not images.overlaps(8, 20)
    assert not images.overlaps(4, 5)


def test_tiles_whose_tokens_attend_to_one_another_stand_in_one_piece():
    spans = placed(0, (2, 3), (6, 3))
    stored = StoredImage(image(0), ImageShape(2, 3, is_whole=True), 8)
    images = RequestImages([spans], [stored], 20)
    assert images.are_whole
    assert [images.divided_by(position) for position in (1, 2, 3, 4, 5, 6, 8, 9, 19)] == [
        *(None, None, (2, 5), (2, 5), None, None, (6, 9), None, None)
    ]
    divided = placed(0, (2, 2), (5, 1), (6, 3))
    with pytest.raises(ValueError, match="must stand at 3 consecutive tokens, got a span of 2"):
        RequestImages([divided], [stored], 20)


def test_content_differs_with_image_and_place_and_not_with_the_digest_that_a_client_gives():
    spans = [(4, 2)]
    content = request_images(placed(0, *spans), contents=(9, 9, 5)).content(0, 16)
    assert content == request_images(placed(1, *spans), contents=(9, 9, 5)).content(0, 16)
    assert content != request_images(placed(2, *spans), contents=(9, 9, 5)).content(0, 16)
    assert content != request_images(placed(0, (5, 2)), contents=(9, 9, 5)).content(0, 16)
    assert content != request_images(placed(0, (4, 1), (7, 1)), contents=(9, 9, 5)).content(0, 16)
    assert not request_images(placed(0, *spans)).content(6, 16)


@pytest.mark.parametrize(
    ("each", "error"),
    [
        ([placed(0, (19, 2))], "in a prompt of 20"),
        ([placed(0, (5, 2)), placed(1, (6, 2))], "one after another"),
        ([placed(0, (5, 1), (4, 1))], "one after another"),
        ([placed(0, (5, 1))], "2 embeddings, but its places in the prompt have 1"),
        ([placed(0, (5, 3))], "2 embeddings, but its places in the prompt have 3"),
    ],
)
def test_places_that_do_not_fit_are_refused(each, error):
    with pytest.raises(ValueError, match=error):
        request_images(*each)


def test_positions_of_tokens_are_those_of_transformers():
    token_ids = [5, *[IMAGE_TOKEN] * 30, 7, 8, *[IMAGE_TOKEN] * 8, 3, 4]
    grids = [(6, 5), (2, 4)]
    images = [StoredImage(image(0), ImageShape(1, rows * columns, columns), 4) for rows, columns in grids]
    request = RequestImages([placed(0, (1, 30)), placed(1, (33, 8))], images, len(token_ids))
    expected, _ = make_image_model("qwen2_vl").model.get_rope_index(
        torch.tensor([token_ids]),
        torch.tensor([[int(token_id == IMAGE_TOKEN) for token_id in token_ids]]),
        torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids]),
    )
    positions = torch.from_numpy(request.rope_positions(len(token_ids) + 2))
    assert torch.equal(positions[:, : len(token_ids)].long(), expected[:, 0])
    assert (positions[:, -3:] == positions[0, -4] + torch.tensor([1, 2, 3])).all()


def test_image_whose_tokens_have_rows_and_columns_is_not_divided():
    stored = StoredImage(image(0), ImageShape(1, 8, 4), 4)
    with pytest.raises(ValueError, match="consecutive tokens of the prompt, got 2 runs"):
        RequestImages([placed(0, (0, 4), (5, 4))], [stored], 10)
