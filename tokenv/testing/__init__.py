"""What agents, estimators, rate targets and codecs must keep to, built in or yours.

from tokenv.testing import check_agent, check_codec, check_estimator, check_rate_target

check_estimator("rloo", gamma=1.0)
check_agent("mymodule:MyAgent")
check_rate_target(MyTarget)
check_codec("mymodule:MyCodec")
"""

from tokenv.lazy import face

__getattr__, __dir__ = face(
    __name__,
    {
        "agent": ("check_agent",),
        "codec": ("check_codec",),
        "estimator": ("check_estimator",),
        "rate_target": ("check_rate_target",),
    },
)
