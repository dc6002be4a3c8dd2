// A fetched event stream as the values of its events, in order.

const END = "[DONE]";

/** Yields the parsed JSON of each `data:` event until [DONE]. Comments (": ping") are skipped. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      throw new Error("The connection ended before the answer did.");
    }
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.startsWith("data: ") ? block.slice(6) : null;
      if (data === END) {
        return;
      }
      if (data !== null) {
        yield JSON.parse(data);
      }
    }
  }
}
