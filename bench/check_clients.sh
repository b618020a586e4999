#!/usr/bin/env bash
# Other people's clients against `yocolm serve` with the bundled model: `make check-clients`.
# The bundled model is no chat model: it never ends an answer and calls no tool by itself, and it
# takes no images. llm-comply's tests of those fail; all others have to pass.
set -euo pipefail
BIN=$(realpath "${BIN:-.venv/bin}")
CLIENTS=${CLIENTS:-.venv/clients}
PORT=${PORT:-8399}
URL=http://127.0.0.1:$PORT
CONSTRAINTS=$PWD/constraints.txt
CHECKS=$PWD/bench/lm_eval_check.py
mkdir -p "$CLIENTS"

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
}

client comply llm-comply==0.5.0
client schemathesis schemathesis==4.32.5
client lm-eval "lm-eval[api]==0.4.13" transformers -c "$CONSTRAINTS"

echo "== llm-comply"
serve --max-model-len 256
"$CLIENTS/comply/bin/llm-comply" -u "$URL/v1" -m bundled -k none --format openai-chat || true

echo "== schemathesis"
"$CLIENTS/schemathesis/bin/schemathesis" run "$URL/openapi.json" --checks not_a_server_error \
    --max-examples 50 --request-timeout 60
stop

echo "== lm-eval"
serve
"$CLIENTS/lm-eval/bin/python" "$CHECKS" client "$URL" > "$CLIENTS/over_http.json"
stop
"$BIN/python" "$CHECKS" offline "$CLIENTS/over_http.json"
