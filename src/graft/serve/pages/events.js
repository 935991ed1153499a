/* server-sent events of an answer to fetch, each parsed; what the server tells as an error is raised */
async function* events(answer) {
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") {
      const told = JSON.parse(part.slice(6));
      if (told.error) throw new Error(told.error.message);
      yield told;
    }
  }
}
