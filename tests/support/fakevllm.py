#!/usr/bin/env python
"""A program that is started as vLLM is, and answers as it does: each answer has the words of the last message, one in
a chunk. What it was started with and asked is in FAKE_VLLM_SEEN. A model called "broken" ends it with an error."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

WORDS = sys.argv[1:]


def option(name: str, default: str = "") -> str:
    return WORDS[WORDS.index(name) + 1] if name in WORDS else default


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "here"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            served = option("--served-model-name")
            self.tell({"data": [{"id": served, "max_model_len": int(option("--max-model-len", "2048"))}]})
        elif self.path == "/metrics":
            self.tell(b"vllm:num_requests_running 0\n", kind="text/plain; version=0.0.4")
        else:
            self.tell(b"")

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(os.environ["FAKE_VLLM_SEEN"], "a") as file:
            file.write(json.dumps({"path": self.path, "body": call}) + "\n")
        if self.path == "/tokenize":
            words = (call.get("prompt") or " ".join(each["content"] for each in call["messages"])).split()
            told = {"count": len(words), "tokens": list(range(len(words))), "max_model_len": 2048}
            self.tell(told | ({"token_strs": words} if call.get("return_token_strs") else {}))
        elif self.path == "/detokenize":
            self.tell({"prompt": " ".join(map(str, call["tokens"]))})
        elif "die" in json.dumps(call):
            os._exit(3)
        elif "refuse" in json.dumps(call):
            self.tell({"error": {"message": "it is\ntoo long", "type": "BadRequestError", "code": 400}}, 400)
        else:
            self.answer(call)

    def tell(self, value: Any, status: int = 200, kind: str = "application/json") -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, call: dict[str, Any]) -> None:
        chat = "messages" in call
        text = call["messages"][-1]["content"] if chat else call["prompt"]
        words = text.split()[: call.get("max_tokens", 64 if chat else 16) or 64]
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        usage |= {"prompt_tokens_details": {"cached_tokens": 4}}
        ends: dict[str, Any] = {"finish_reason": "stop", "stop_reason": None}
        if chat and call.get("tools") and call.get("tool_choice") != "none":
            pieces: list[dict[str, Any]] = [
                {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
            ]
            ends["finish_reason"] = "tool_calls"
        else:
            pieces = [{"content": f"{word} "} for word in words]
            pieces = [{"reasoning_content": "Hm."}, *pieces] if call.get("chat_template_kwargs") else pieces
        if not call.get("stream"):
            message = {"role": "assistant", "content": "".join(piece.get("content", "") for piece in pieces)}
            self.tell({"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, piece in enumerate(({"role": "assistant", "content": ""}, *pieces, {}) if chat else (*pieces, {})):
            inner = {"delta": piece} if chat else {"text": piece.get("content", "")}
            choice = {"index": 0, **inner, **(ends if number == len(pieces) + chat else {"finish_reason": None})}
            self.chunk({"id": "x", "model": call["model"], "choices": [choice], "usage": usage})
            time.sleep(float(os.environ.get("FAKE_VLLM_PAUSE", "0")))
        self.chunk({"choices": [], "usage": usage})
        self.write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, value: Any) -> None:
        self.write(f"data: {json.dumps(value)}\n\n".encode())

    def write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        return super().get_request()[0], ("here", 0)


def main() -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as engines have processes of their own
    seen = {"words": WORDS, "pids": [os.getpid(), child.pid], "environment": dict(os.environ)}
    Path(os.environ["FAKE_VLLM_SEEN"]).write_text(json.dumps(seen) + "\n")
    if option("--served-model-name") == "broken":
        sys.exit("ValueError: this model is broken")
    Server(option("--uds"), Handler).serve_forever()


if __name__ == "__main__":
    main()
