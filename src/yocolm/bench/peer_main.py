"""The process behind one peer of `yocolm bench peers`: JSON lines in, JSON lines out.

It runs in whatever interpreter the user names and imports nothing of yocolm:

    PYTHON peer_main.py PEER_FILE

A request is `{"do": "load", ...options}` or `{"do": "run", "prompts": [[ids]], "new_tokens": n}`;
each gets one line, `{"error": text}` if it failed. PEER_FILE defines `Peer(options)` with
`run(prompts, new_tokens) -> {"first": s, "each": s}`: seconds until every prompt has its first
token, and seconds a step after that (null with one token).
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def main(path: str) -> None:
    # Libraries print to standard output as they like; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.pop("do") == "load":
                peer = runpy.run_path(path)["Peer"](request)
                answer = {}
            elif peer is None:
                answer = {"error": "nothing is loaded"}
            else:
                answer = peer.run(request["prompts"], request["new_tokens"])
        except (Exception, SystemExit) as error:  # whatever another library raises is its result
            text = " ".join(str(error).split())
            answer = {"error": f"{type(error).__name__}: {text[:400]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose names are not meant for others to import
    main(sys.argv[1])
