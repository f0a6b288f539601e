#!/usr/bin/env bash
# Remakes assets/fonts/DejaVuSans.ttf. Needs Debian's fonts-dejavu-core and fonttools (`pip install fonttools`).
set -euo pipefail
cd "$(dirname "$0")/.."
signs="U+2010-2015,U+2018-201E,U+2022,U+2026,U+2032,U+20AC,U+2190-2193,U+2212,U+2248,U+2260,U+2264,U+2265"
pyftsubset /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf --no-hinting --layout-features='' \
    --drop-tables+=GPOS,GSUB,GDEF,FFTM --output-file=assets/fonts/DejaVuSans.ttf \
    --unicodes="U+0020-007E,U+00A0-017F,U+0391-03A9,U+03B1-03C9,$signs"
