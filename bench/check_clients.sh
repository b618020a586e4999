#!/usr/bin/env bash
# Other people's clients against `yocolm serve` with the bundled model: `make check-clients`.
# Each has an environment of its own under CLIENTS and a limit of time; only loopback is used once
# they are installed. Ends with 1 if one of them fails.
#
# What llm-comply asks for and the bundled model cannot do:
# - chat-tool-calling: with tool_choice "required" and no limit to the number of calls, the model,
#   which has learnt no end, lists calls until the context is full (by chance, it may end before).
#   node_client.mjs asks for a single call, which does end.
# - chat-image-input: it takes text only, and says so with 400.
# - chat-reasoning-summary: llm-comply skips it for models that are not OpenAI's.
# Each is excused for that reason alone.
set -euo pipefail
BIN=$(realpath "${BIN:-.venv/bin}")
CLIENTS=${CLIENTS:-.venv-clients}
PORT=${PORT:-8399}
URL=http://127.0.0.1:$PORT
HERE=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
CONSTRAINTS=$HERE/../constraints.txt
CHECKS=$HERE/lm_eval_check.py
mkdir -p "$CLIENTS"
CLIENTS=$(realpath "$CLIENTS")

client() { # name, requirements
    [ -x "$CLIENTS/$1/bin/python" ] || "$BIN/python" -m venv "$CLIENTS/$1"
    "$CLIENTS/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

serve() { # options
    "$BIN/yocolm" serve --port "$PORT" --log-level warning "$@" &
    SERVER=$!
    trap 'kill $SERVER 2> /dev/null || true' EXIT
    until "$BIN/python" -c "import urllib.request as u; u.urlopen('$URL/ready')" 2> /dev/null; do
        kill -0 $SERVER
        sleep 0.5
    done
}

stop() {
    kill -TERM $SERVER
    wait $SERVER
    trap - EXIT
}

client comply llm-comply==0.5.0
client schemathesis schemathesis==4.32.5
client lm-eval "lm-eval[api]==0.4.13" transformers -c "$CONSTRAINTS"
client aiperf aiperf==0.13.0
# The ranks of cl100k_base, which aiperf's tokenizer reads: litellm carries them.
[ -d "$CLIENTS/litellm/litellm" ] || "$BIN/python" -m pip install --quiet \
    --disable-pip-version-check --no-deps --target "$CLIENTS/litellm" litellm==1.110.2

echo "== llm-comply"
serve --max-model-len 512
timeout 600 "$CLIENTS/comply/bin/llm-comply" -u "$URL/v1" -m bundled -k none \
    --format openai-chat --json > "$CLIENTS/comply.json" || true
"$BIN/python" - "$CLIENTS/comply.json" << 'PYTHON'
import json, sys

excused = {
    "chat-tool-calling": "finish_reason: expected 'tool_calls', got 'length'",
    "chat-image-input": "HTTP 400 (expected [200])",
    "chat-reasoning-summary": "reasoning requires o-series or gpt-5 models",
}
results = json.load(open(sys.argv[1]))["results"]
for result in results:
    print(f"{result['status']:8} {result['id']}", *result.get("errors", ()), sep="\n    - ")
wrong = [
    result["id"]
    for result in results
    if result["status"] != "passed" and excused.get(result["id"]) not in result.get("errors", ())
]
if wrong or len(results) != 9:
    sys.exit(f"llm-comply: of {len(results)} checks, {wrong} should have passed")
PYTHON

if command -v npm > /dev/null; then
    echo "== openai for Node"
    mkdir -p "$CLIENTS/node"
    cp "$HERE/node_client.mjs" "$CLIENTS/node/"
    npm install --silent --no-audit --no-fund --prefix "$CLIENTS/node" openai@6.49.0
    timeout 120 node "$CLIENTS/node/node_client.mjs" "$URL"
else
    echo "== openai for Node: left out, npm is not installed"
fi

echo "== aiperf"
rm -rf "$CLIENTS/aiperf-results"
TIKTOKEN_CACHE_DIR=$CLIENTS/litellm/litellm/litellm_core_utils/tokenizers timeout 600 \
    "$CLIENTS/aiperf/bin/aiperf" profile --model bundled --url "$URL" --endpoint-type chat \
    --streaming --tokenizer cl100k_base --concurrency 8 --request-count 64 --random-seed 1 \
    --synthetic-input-tokens-mean 80 --output-tokens-mean 32 --use-server-token-count \
    --extra-inputs ignore_eos:true --ui none --artifact-dir "$CLIENTS/aiperf-results" \
    > "$CLIENTS/aiperf.log" 2>&1 || { tail -50 "$CLIENTS/aiperf.log"; exit 1; }
"$BIN/python" - "$CLIENTS/aiperf-results/profile_export_aiperf.json" << 'PYTHON'
import json, sys

found = json.load(open(sys.argv[1]))
done, rate = found["request_count"]["avg"], found["output_token_throughput"]["avg"]
print(f"{done:.0f} of 64 requests, 8 at once; {rate:.0f} tokens/s; errors {found['error_summary']}")
sys.exit(done != 64 or found["error_summary"] != [] or not found["is_complete"])
PYTHON

echo "== schemathesis"
cd "$CLIENTS" && timeout 900 schemathesis/bin/schemathesis run "$URL/openapi.json" \
    --checks not_a_server_error --max-examples 50 --request-timeout 60
stop

echo "== lm-eval"
serve
timeout 600 "$CLIENTS/lm-eval/bin/python" "$CHECKS" client "$URL" > "$CLIENTS/over_http.json"
stop
"$BIN/python" "$CHECKS" offline "$CLIENTS/over_http.json"
echo "== all clients are served"
