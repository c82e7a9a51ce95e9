"""Files and pixels that become RGB images, and those that are refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from support.image_models import file_of, picture

from vllm_mp.client.images.media import GivenImage, given_images, image_job
from vllm_mp.client.images.pixels import open_image, rgb_of

RED, WHITE = (255, 0, 0), (255, 255, 255)


def decoded(file):
    return rgb_of(open_image(file))


def plain(mode, color, size=(3, 2)):
    return Image.new(mode, size, color)


def turned():
    """Return a file whose EXIF says that its left edge is the top of the picture."""
    image = picture(4, 2)
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(image, "PNG", exif=exif), np.rot90(np.asarray(image), -1)


def gray_of_16_bits(value, transparent):
    """Return a PNG file in which one gray is transparent. Pillow reads such files, and does not write them."""
    file = file_of(Image.fromarray(np.full((2, 3), value, np.uint16)))
    name_and_data = b"tRNS" + struct.pack(">H", transparent)
    chunk = struct.pack(">I", 2) + name_and_data + struct.pack(">I", zlib.crc32(name_and_data))
    pixels = file.index(b"IDAT") - 4
    return file[:pixels] + chunk + file[pixels:]


def animation():
    frames = [plain("RGB", RED), plain("RGB", (0, 0, 255))]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("file", "pixel"),
    [
        (file_of(plain("RGB", RED)), RED),
        (file_of(plain("RGB", RED, (1, 1))), RED),
        (file_of(plain("P", 0)), (0, 0, 0)),
        (file_of(plain("L", 77)), (77, 77, 77)),
        (file_of(plain("RGBA", (255, 0, 0, 0))), WHITE),
        (file_of(plain("LA", (0, 255))), (0, 0, 0)),
        (file_of(Image.fromarray(np.full((2, 3), 0x4D00, np.uint16))), (77, 77, 77)),
        (gray_of_16_bits(0x4D01, transparent=0x4D01), WHITE),
        (gray_of_16_bits(0x4D01, transparent=0x4D02), (77, 77, 77)),
        (file_of(plain("I", 0x4D00), "TIFF"), (77, 77, 77)),
        (file_of(plain("I", 77), "TIFF"), (77, 77, 77)),
        (file_of(plain("RGB", RED), transparency=RED), WHITE),
        (file_of(plain("CMYK", (0, 0, 0, 255)), "TIFF"), (0, 0, 0)),
        (animation(), RED),
    ],
    ids=[
        "rgb",
        "one pixel",
        "palette",
        "gray",
        "transparent",
        "opaque gray",
        "16 bits",
        "transparent gray of 16 bits",
        "opaque gray of 16 bits",
        "16 of 32 bits",
        "8 of 32 bits",
        "transparent color",
        "cmyk",
        "first frame",
    ],
)
def test_file_becomes_rgb(file, pixel):
    image = decoded(file)
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == pixel


def test_image_is_turned_as_its_exif_orientation_says():
    file, upright = turned()
    assert np.array_equal(np.asarray(decoded(file)), upright)


@pytest.mark.parametrize("exif", [b"Exif\0\0no TIFF header", b"Exif\0\0II*\0"])
def test_image_whose_exif_cannot_be_read_is_not_turned(exif):
    image = picture(4, 2)
    assert np.array_equal(np.asarray(decoded(file_of(image, "PNG", exif=exif))), np.asarray(image))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"not an image", "no image in the format PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "no image in the format"),
        (file_of(picture(64, 64))[:400], "cannot be decoded: .*truncated"),
        (file_of(picture(64, 64), "JPEG")[:400], "cannot be decoded: Truncated File Read"),
        (file_of(plain("1", 0, (20_000, 20_000))), "the limit is 67108864 pixels"),
        (file_of(plain("1", 0, (9_000, 9_000))), "9000 x 9000 pixels, the limit is 67108864 pixels"),
    ],
    ids=["no image", "starts a program", "truncated", "truncated header", "bomb", "too large"],
)
def test_file_that_cannot_be_used_is_refused_with_the_cause(file, said):
    with pytest.raises(ValueError, match=said):
        decoded(file)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ([1], TypeError, "must be a dict"),
        ({"video": object()}, NotImplementedError, "'video'.*images only"),
        ({"image": "cat.png"}, TypeError, r"\['image'\]\[0\] is a str; open the file"),
        ({"image": [picture(2, 2), 5]}, TypeError, r"\['image'\]\[1\] must be an image of Pillow"),
        ({"image": b""}, ValueError, "1 to 67108864 bytes, got 0"),
        ({"image": np.zeros((3, 8, 8), np.uint8)}, ValueError, r"\[height, width, 3\] of uint8, got \[3, 8, 8\]"),
        ({"image": np.zeros((8, 8, 3))}, ValueError, "float64; transpose or convert it"),
        ({"image": np.zeros((0, 8, 3), np.uint8)}, ValueError, "8 x 0"),
        ({"image": np.broadcast_to(np.uint8(0), (20_000, 20_000, 3))}, ValueError, "20000 x 20000 pixels, the limit"),
    ],
)
def test_object_that_is_no_image_is_refused_by_name(data, error, said):
    with pytest.raises(error, match=said):
        given_images(data, None)


def test_forms_of_an_image_give_the_same_pixels():
    image = picture(5, 4)
    pixels = np.asarray(image)
    jobs = [
        image_job(given, 0, b"{}") for given in (image, pixels, np.dstack([pixels, np.full((4, 5), 255, np.uint8)]))
    ]
    assert {(job.width, job.height, job.data) for job in jobs} == {(5, 4, pixels.tobytes())}
    assert image_job(Image.open(io.BytesIO(file_of(image))), 0, b"{}") == jobs[0]


def test_names_of_images_must_be_one_for_each():
    cat, dog = picture(2, 2), picture(3, 3)
    assert given_images({"image": [cat, dog]}, {"image": ["cat", None]}) == [GivenImage(cat, "cat"), GivenImage(dog)]
    with pytest.raises(ValueError, match="1 entries for 2 images"):
        given_images({"image": [cat, dog]}, {"image": ["cat"]})


@pytest.mark.parametrize("data", [{"image": [None]}, {"image": None}, None])
def test_image_with_a_name_may_be_left_out(data):
    assert given_images(data, {"image": ["cat"]}) == [GivenImage(None, "cat")]


@pytest.mark.parametrize(
    ("uuids", "error", "said"),
    [
        ({"image": 3}, TypeError, "list of str or None"),
        ({"image": [3]}, TypeError, r"multi_modal_uuids\['image'\]\[0\] must be a str or None, got 3"),
        ({"image": ["x" * 1025]}, ValueError, "1 to 1024 characters, got 1025"),
        ({"image": [None]}, TypeError, "is None, and has no name in multi_modal_uuids"),
    ],
)
def test_name_that_cannot_be_used_is_refused(uuids, error, said):
    with pytest.raises(error, match=said):
        given_images(None, uuids)
