"""A server of OpenAI's protocol that answers at once, or after `--hold SECONDS`; prints its address."""

import argparse
import json

import anyio
from aiohttp import web

ANSWER = {
    "id": "a", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "an answer"}}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
}  # fmt: skip
BODY = json.dumps(ANSWER).encode()


async def main(hold: float) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if hold:
            await anyio.sleep(hold)
        return web.Response(body=BODY, content_type="application/json")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    port = runner.addresses[0][1]
    print(f"http://127.0.0.1:{port}/v1", flush=True)
    await anyio.sleep_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold", type=float, default=0.0)
    anyio.run(main, parser.parse_args().hold)
