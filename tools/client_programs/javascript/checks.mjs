// What the programs of this folder in JavaScript share; it is what checks.py is for those in Python.
const options = Object.fromEntries(process.argv.slice(2).map((text, i, all) => [text.slice(2), all[i + 1]]));
export const URL = options.url ?? "http://127.0.0.1:8000";
export const BASE_URL = `${URL}/v1`;
export const MODEL = options.model ?? "smollm2-135m-instruct";
export const KEY = process.env.VLLM_MP_API_KEY ?? "none";
export const TEXT = "Anna is a baker, 30 years old.";
const TIMEOUT_MS = 60_000;
const checks = [];

export function check(name, call) {
  checks.push([name, call]);
}

export function assert(value) {
  if (!value) throw new Error(`expected something, got ${JSON.stringify(value)}`);
}

export async function run() {
  let failed = false;
  for (const [name, call] of checks) {
    const late = new Promise((_, reject) => setTimeout(() => reject(new Error("no answer within 60 s")), TIMEOUT_MS).unref());
    try {
      await Promise.race([call(), late]);
      console.log(`ok ${name}`);
    } catch (error) {
      failed = true;
      console.log(`FAILED ${name}: ${String(error).replace(/\s+/g, " ").slice(0, 300)}`);
      console.error(error);
    }
  }
  process.exit(failed ? 1 : 0);
}
