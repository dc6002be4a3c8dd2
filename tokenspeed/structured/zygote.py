"""The zygote, the process that those of grammars are forked from, started by a `GrammarHost`:
`python -m tokenspeed.structured.zygote`.

It loads the vocabulary once, so that a fork has it at once and for nothing, and does no other work:
it can always end its children, and ends them all when its server is gone. One thread, so that a
fork copies no lock that somebody holds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection

import msgspec
from tokenizers import Tokenizer as Backend

from tokenspeed.request import InvalidRequest
from tokenspeed.structured.grammar_process import (
    end_with_parent,
    follow,
    limit_memory,
    run_deep,
)
from tokenspeed.structured.orders import Kill, Open, ToZygote, Vocabulary
from tokenspeed.structured.tokens import TokenTable, token_table
from tokenspeed.text.tokenizer import Tokenizer

_REAP_S = 1.0
_NICE = 10
_MAX_MESSAGE = 1 << 10


class _Zygote:
    def __init__(self, control: socket.socket, table: TokenTable | str) -> None:
        self._control = control
        self._table = table
        self._children: dict[int, int] = {}

    def run(self) -> None:
        """Until the server is gone."""
        decoder = msgspec.msgpack.Decoder(ToZygote)
        while True:
            if select.select([self._control], [], [], _REAP_S)[0]:
                message, files, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 3)
                if not message:
                    break
                self._obey(decoder.decode(message), files)
            self._reap()
        for number in [*self._children]:
            self._kill(number)

    def _obey(self, order: ToZygote, files: list[int]) -> None:
        if isinstance(order, Open):
            self._fork(order.number, files)
        elif isinstance(order, Kill):
            self._kill(order.number)
        elif (child := self._children.get(order.number)) is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child, _NICE)

    def _fork(self, number: int, files: list[int]) -> None:
        child = os.fork()
        if child == 0:
            try:
                self._control.close()
                end_with_parent()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics quote what they choke on
                limit_memory()
                connection = Connection(files[0])
                run_deep(lambda: follow(connection, files[1], files[2], self._table))
            finally:
                os._exit(0)
        self._children[number] = child
        for file in files:
            os.close(file)

    def _kill(self, number: int) -> None:
        child = self._children.pop(number, None)
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def _reap(self) -> None:
        ended = [
            number for number, child in self._children.items() if os.waitpid(child, os.WNOHANG)[0]
        ]
        for number in ended:
            del self._children[number]


def _load(file: int) -> TokenTable | str:
    data = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    asked = msgspec.msgpack.decode(data, type=Vocabulary)
    tokenizer = Tokenizer(Backend.from_str(asked.tokenizer), special_tokens=asked.special_tokens)
    try:
        return token_table(tokenizer, asked.vocab_size, frozenset(asked.eos_ids))
    except InvalidRequest as error:
        return str(error)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, vocabulary = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    table = _load(vocabulary)
    gc.collect()
    gc.freeze()
    _Zygote(control, table).run()


if __name__ == "__main__":
    main()
