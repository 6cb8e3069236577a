"""The rights of tenants as the operator gives them: the file of `--tenants`, and the options beside it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pw.core.errors import ArgumentError, Error
from pw.core.ids import CONTROLLER
from pw.core.rights import TenantRights, rights_of_options
from pw.core.tenants import shares_of_tenants
from pw.transport.log import log


@dataclass(frozen=True, slots=True)
class RightsFile:
    """What a controller was started with."""

    path: str
    """Path of the file; empty without one."""
    policy: str
    max_share: float | None
    max_priority: int | None
    tenant_shares: str
    """Shares of tenants, as in `research=2,rivals=1`."""

    def read(self) -> TenantRights:
        """Return the rights of all tenants. Raises ArgumentError, which names the line, if one is wrong."""
        if self.tenant_shares and self.policy != "share":
            raise ArgumentError("--tenant-shares is for --policy share")
        shares = shares_of_tenants(self.tenant_shares)
        text: str | None = None
        if self.path:
            try:
                text = Path(self.path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ArgumentError(f"--tenants {self.path} cannot be read: {error}") from None
        rights = rights_of_options(self.max_share, self.max_priority, shares, text, self.path)
        if self.policy != "share" and any(row.share != 1.0 for row in rights.all()):
            raise ArgumentError(f"{self.path} has shares, and they are for --policy share")
        return rights

    def follow(
        self, loop: asyncio.AbstractEventLoop, changed: Callable[[TenantRights], object]
    ) -> None:
        """Read the file again on SIGHUP, and tell of its rights; if it is wrong, the old rights stay."""
        if self.path:
            loop.add_signal_handler(signal.SIGHUP, self._again, changed)

    def _again(self, changed: Callable[[TenantRights], object]) -> None:
        try:
            rights = self.read()
        except Error as error:
            log("error", "rights refused; those of before stay", CONTROLLER, reason=str(error))
            return
        changed(rights)
        log("info", "rights read again", CONTROLLER, file=self.path)
