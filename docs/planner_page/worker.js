// Runs the planner in Python, beside the page, so that the page never waits for it.
"use strict";
importScripts("pyodide/pyodide.js");

const ready = (async () => {
  const say = (text) => postMessage({ progress: text });
  say("Loading Python: 15 MB, or 8 MB where the server compresses files …");
  const packed = Object.fromEntries(["numpy.zip", "planner.zip"].map((name) => [name, fetch(name)]));
  const python = await loadPyodide({ indexURL: "pyodide/" });
  // This build of NumPy asks the C library who calls it, to reuse large temporary arrays, and WebAssembly
  // has no such function. No callers is an answer that NumPy takes.
  python._module.LDSO.loadedLibsByName.__main__.exports.backtrace = () => 0;
  for (const [name, fetched] of Object.entries(packed)) {
    const reply = await fetched;
    if (!reply.ok) throw new Error(`${name} must lie beside the page; the server says ${reply.status}.`);
    python.unpackArchive(await reply.arrayBuffer(), "zip", { extractDir: "/lib/python3.11/site-packages" });
  }
  say("Starting the planner …");
  return python.pyimport("answers");
})();

onmessage = async ({ data: { id, name, argument } }) => {
  try {
    const answers = await ready;
    postMessage({ id, answer: JSON.parse(argument === undefined ? answers[name]() : answers[name](argument)) });
  } catch (error) {
    postMessage({ id, failure: String(error) });
  }
};
