// The images of the next message: pasted, dropped or chosen, and shown before they are sent.

import { counted } from "./units.js";

const SERVED_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]; // Others are sent as JPEG.
const URL_SHARE = 0.9; // Share of a request that its images may take; the rest is for its texts.
const JPEG_QUALITY = 0.9;
const SHRINK = 0.75; // An image that is still too long is made smaller by this factor.
const SMALLEST_PX = 32;
const NO_IMAGES = "This model takes no images.";

const byId = (id) => document.getElementById(id);

export class AttachedImages {
  /**
   * `present()` returns the images of the conversation so far, as {name, url}. Images can be dropped anywhere in `area`,
   * and pasted into `field`.
   */
  constructor(area, field, { present }) {
    this.present = present;
    this.field = field;
    this.limits = undefined; // As the server's greeting has them: null if the model takes no images.
    this.images = [];
    this.reading = Promise.resolve();
    this.list = byId("attached");
    this.note = byId("image-note");
    const input = byId("image-files");
    byId("add-images").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add([...input.files]);
      input.value = ""; // So that the same file can be chosen again.
    });
    field.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length || event.clipboardData.getData("text/plain")) return; // A copied text may come with its picture.
      event.preventDefault();
      this.add(files);
    });
    // A file that is dropped beside the chat would otherwise take the place of the page.
    window.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = area.contains(event.target) ? "copy" : "none";
      area.classList.toggle("is-drop-target", area.contains(event.target));
    });
    window.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) area.classList.remove("is-drop-target");
    });
    window.addEventListener("drop", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      area.classList.remove("is-drop-target");
      if (area.contains(event.target)) this.add([...event.dataTransfer.files]);
    });
  }

  /** Take in what the server says of images. */
  setLimits(limits) {
    this.limits = limits;
    byId("add-images").hidden = !limits;
  }

  /** Add the images in `files`, one after the other; return when they are shown, or a note says why not. */
  add(files) {
    this.say("");
    this.reading = this.reading.then(async () => {
      for (const file of files) await this.addFile(file);
      this.field.focus();
    });
    return this.reading;
  }

  async addFile(file) {
    try {
      this.images.push(await this.read(file));
      this.show();
    } catch (error) {
      this.say(error.message);
    }
  }

  /** Return the image in `file`, made smaller if the server would refuse it. Throws an Error that says why not. */
  async read(file) {
    if (this.limits === undefined) throw new Error("The server has not said yet whether its model takes images.");
    if (this.limits === null) throw new Error(NO_IMAGES);
    const others = [...this.present(), ...this.images];
    if (others.length >= this.limits.max_images) {
      throw new Error(`The model takes at most ${counted(this.limits.max_images, "image")} in a conversation.`);
    }
    const bitmap = await createImageBitmap(file).catch(() => {
      throw new Error(`${file.name} is no image that this browser can read.`);
    });
    const room = URL_SHARE * this.limits.max_body_bytes - others.reduce((sum, { url }) => sum + url.length, 0);
    const fits = urlLength(file.size) <= room && file.size <= this.limits.max_file_bytes;
    const hasFewPixels = bitmap.width * bitmap.height <= this.limits.max_pixels;
    const isServed = SERVED_TYPES.includes(file.type);
    if (fits && hasFewPixels && isServed) return { name: file.name, url: await dataUrl(file) };
    const blob = await smaller(bitmap, Math.min(room, urlLength(this.limits.max_file_bytes)), this.limits.max_pixels);
    if (blob === null) throw new Error(`The conversation has no room for ${file.name}: begin a new chat.`);
    if (!fits || !hasFewPixels) this.say(`${file.name} was made smaller, because the server takes no larger images.`);
    return { name: file.name, url: await dataUrl(blob) };
  }

  /** Return the images, which are then no longer those of the next message. */
  take() {
    const taken = this.images;
    this.images = [];
    this.show();
    this.say("");
    return taken;
  }

  /** Throw an Error if `images` cannot be sent to the model. */
  check(images) {
    if (images.length && this.limits === null) throw new Error(`${NO_IMAGES} The conversation has some: begin a new chat.`);
  }

  show() {
    this.list.hidden = !this.images.length;
    this.list.replaceChildren(...this.images.map((image) => this.item(image)));
  }

  item(image) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-label", `Remove ${image.name}`);
    button.textContent = "×";
    button.addEventListener("click", () => {
      this.images.splice(this.images.indexOf(image), 1);
      this.show();
      this.say("");
      this.field.focus();
    });
    item.append(picture(image), button);
    return item;
  }

  say(words) {
    this.note.textContent = words;
    this.note.hidden = !words;
  }
}

/** Return an element that shows an image. */
export function picture({ name, url }) {
  const element = new Image();
  element.alt = name;
  element.title = name;
  element.src = url;
  return element;
}

/** Return the number of characters of a file of that size as a data URL. */
function urlLength(size) {
  return 4 * Math.ceil(size / 3) + 32;
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("The image could not be read.")));
    reader.readAsDataURL(blob);
  });
}

/** Return `bitmap` as a JPEG, as large as both limits allow, on white; null if nothing readable would be left. */
async function smaller(bitmap, maxCharacters, maxPixels) {
  const canvas = document.createElement("canvas");
  let scale = Math.min(1, Math.sqrt(maxPixels / (bitmap.width * bitmap.height)));
  for (; ; scale *= SHRINK) {
    canvas.width = Math.max(1, Math.floor(scale * bitmap.width));
    canvas.height = Math.max(1, Math.floor(scale * bitmap.height));
    const context = canvas.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", JPEG_QUALITY));
    if (blob !== null && urlLength(blob.size) <= maxCharacters) return blob;
    if (Math.max(canvas.width, canvas.height) * SHRINK < SMALLEST_PX) return null;
  }
}
