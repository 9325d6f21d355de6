"""The environment: one observation, one-pass rollouts, stepping, gymnasium's face, writing on."""

from tokenv.env.registration import register

register()
