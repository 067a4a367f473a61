// Shows the openapi.json that lies beside this page, wherever a proxy has put both. Where the service has API keys, it is
// asked for with the reader's key, which stays in this page.
"use strict";

const base = new URL(".", location.href);
const form = document.getElementById("key");
const problem = document.getElementById("problem");

async function show(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL("openapi.json", base), { headers });
  form.hidden = answer.status !== 401;
  if (!answer.ok) {
    problem.textContent = answer.status !== 401 ? `The service answers ${answer.status}: try again later.` : key ? "The key is not valid." : "";
    return;
  }
  problem.textContent = "";
  const spec = await answer.json();
  spec.servers = [{ url: base.href.replace(/\/$/, "") }];
  const page = SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    deepLinking: true,
    defaultModelsExpandDepth: 0,
    validatorUrl: null,
    onComplete: () => key && page.preauthorizeApiKey("HTTPBearer", key),
  });
}

function start(key) {
  show(key).catch(() => { problem.textContent = "The service can't be reached."; });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start(new FormData(form).get("key"));
});
start();
