"""Checks of agents, estimators, rate targets and codecs, built in or third-party.

from tokenv.testing import check_agent, check_codec, check_estimator, check_rate_target

check_estimator("rloo", gamma=1.0)
check_agent("mymodule:MyAgent")
check_rate_target(MyTarget)
check_codec("mymodule:MyCodec")
"""

from tokenv.core import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "agent_checks": ("check_agent",),
        "codec_checks": ("check_codec",),
        "estimator_checks": ("check_estimator", "check_rate_target"),
    },
)
