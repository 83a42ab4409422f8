"""Stands in for a vLLM API server: answers as one does, without a model. ``PORT`` is argv[1]."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """\
# TYPE vllm:maru_loaded_bytes_total counter
vllm:maru_loaded_bytes_total{engine="0"} 100.0
vllm:maru_loaded_bytes_total{engine="1"} 23.0
# TYPE vllm:running gauge
vllm:running 7.0
"""
RESETS_THAT_FAIL = 2


class Handler(BaseHTTPRequestHandler):
    resets = 0

    def do_GET(self) -> None:
        self._answer(METRICS.encode() if self.path == "/metrics" else b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/reset_prefix_cache":
            Handler.resets += 1
            success = Handler.resets > RESETS_THAT_FAIL
            self._answer(json.dumps({"success": success}).encode())
        else:
            self._answer("".join(self._events(json.loads(body))).encode())

    def _events(self, request):
        prompt = request["prompt"]
        for index in range(request["max_tokens"]):
            choice = {"token_ids": [prompt[0] + index], "logprobs": {"token_logprobs": [-0.5]}}
            yield f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"
        details = {"cached_tokens": len(prompt) - 1}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print("fake server starts", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
