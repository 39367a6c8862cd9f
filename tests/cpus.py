"""Other machines, as registers for `_kt.testing.use_cpu`. Bits are those of Intel's and AMD's
manuals (CPUID leaves 1, 7.0 and 7.1; XCR0).
"""

from __future__ import annotations

# leaf 1, ECX
FMA, OSXSAVE, AVX, F16C = 1 << 12, 1 << 27, 1 << 28, 1 << 29
# leaf 7.0, EBX
AVX2, AVX512F, AVX512DQ, AVX512PF, AVX512ER = 1 << 5, 1 << 16, 1 << 17, 1 << 26, 1 << 27
AVX512CD, AVX512BW, AVX512VL = 1 << 28, 1 << 30, 1 << 31
# leaf 7.0, ECX
AVX512_VBMI, AVX512_VNNI = 1 << 1, 1 << 11
# leaf 7.0, EDX
AMX_BF16, AMX_TILE, AMX_INT8 = 1 << 22, 1 << 24, 1 << 25
# leaf 7.1, EAX
AVX_VNNI, AVX512_BF16 = 1 << 4, 1 << 5
# XCR0: state that the operating system saves
X87_SSE, YMM, MASK_ZMM, TILE = 0x3, 0x4, 0xE0, 0x60000

SKYLAKE = AVX2 | AVX512F | AVX512DQ | AVX512CD | AVX512BW | AVX512VL  # Skylake-X and all after it


INTEL, AMD = "GenuineIntel", "AuthenticAMD"


def registers(
    *,
    ecx1=FMA | OSXSAVE | AVX | F16C,
    ebx7=0,
    ecx7=0,
    edx7=0,
    eax71=0,
    xcr0=X87_SSE | YMM,
    tiles=0,
    vendor=INTEL,
):
    return {
        "leaf1_ecx": ecx1,
        "leaf7_ebx": ebx7,
        "leaf7_ecx": ecx7,
        "leaf7_edx": edx7,
        "leaf71_eax": eax71,
        "xcr0": xcr0,
        "tiles": bool(tiles),
        "vendor": vendor,
    }


def with_zmm(ebx7=SKYLAKE, **more):
    return registers(ebx7=ebx7, **{"xcr0": X87_SSE | YMM | MASK_ZMM} | more)


def sapphire_rapids(xcr0=X87_SSE | YMM | MASK_ZMM | TILE, **more):
    return with_zmm(
        ecx7=AVX512_VBMI | AVX512_VNNI,
        edx7=AMX_BF16 | AMX_TILE | AMX_INT8,
        eax71=AVX_VNNI | AVX512_BF16,
        xcr0=xcr0,
        **more,
    )


# What a tier asks for beyond what the rest of its row says is missing.
FMA_AVX2 = {"avx2", "fma"}
F_BW_VL_DQ = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
VNNI, VBMI, BF16, CLIENT = {"avx512_vnni"}, {"avx512_vbmi"}, {"avx512_bf16"}, {"avx_vnni"}
TILES = {"amx_tile", "amx_int8", "amx_bf16"}
NEEDS = {
    "scalar": set(),
    "avx2": FMA_AVX2,
    "avx_vnni": FMA_AVX2 | CLIENT,
    "avx512": F_BW_VL_DQ | {"fma"},
    "avx512_vnni": F_BW_VL_DQ | {"fma"} | VNNI,
    "avx512_bf16": F_BW_VL_DQ | {"fma"} | VNNI | VBMI | BF16,
    "amx": F_BW_VL_DQ | {"fma"} | VNNI | VBMI | BF16 | TILES,
}
NO_AVX512 = F_BW_VL_DQ | VNNI | VBMI | BF16 | TILES

# name: registers, the tier chosen, every feature that is missing
MACHINES = {
    "haswell": (registers(ebx7=AVX2), "avx2", CLIENT | NO_AVX512),
    "zen3": (registers(ebx7=AVX2, vendor=AMD), "avx2", CLIENT | NO_AVX512),
    "alder_lake": (registers(ebx7=AVX2, eax71=AVX_VNNI), "avx_vnni", NO_AVX512),
    "knights_landing": (
        with_zmm(ebx7=AVX2 | AVX512F | AVX512PF | AVX512ER | AVX512CD),
        "avx2",
        CLIENT | (NO_AVX512 - {"avx512f"}),
    ),
    "skylake_x": (with_zmm(), "avx512", CLIENT | VNNI | VBMI | BF16 | TILES),
    "cascade_lake": (with_zmm(ecx7=AVX512_VNNI), "avx512_vnni", CLIENT | VBMI | BF16 | TILES),
    "cooper_lake": (
        with_zmm(ecx7=AVX512_VNNI, eax71=AVX512_BF16),
        "avx512_vnni",
        CLIENT | VBMI | TILES,
    ),
    "ice_lake": (
        with_zmm(ecx7=AVX512_VNNI | AVX512_VBMI),
        "avx512_vnni",
        CLIENT | BF16 | TILES,
    ),
    "zen5": (
        with_zmm(ecx7=AVX512_VNNI | AVX512_VBMI, eax71=AVX_VNNI | AVX512_BF16, vendor=AMD),
        "avx512_bf16",
        TILES,
    ),
    "zen4": (
        with_zmm(ecx7=AVX512_VNNI | AVX512_VBMI, eax71=AVX512_BF16, vendor=AMD),
        "avx512_bf16",
        CLIENT | TILES,
    ),
    "sapphire_rapids": (sapphire_rapids(tiles=1), "amx", set()),
    # on Intel the bf16 tier is slow and only runs when forced
    "sapphire_rapids_refused": (sapphire_rapids(), "avx512_vnni", {"amx_tile"}),
    # Linux before 5.16 does not know tiles and does not save them
    "sapphire_rapids_old_kernel": (
        sapphire_rapids(xcr0=X87_SSE | YMM | MASK_ZMM),
        "avx512_vnni",
        {"amx_tile"},
    ),
    "hypervisor_without_zmm": (
        sapphire_rapids(xcr0=X87_SSE | YMM),
        "avx_vnni",
        NO_AVX512 - {"amx_int8", "amx_bf16"},
    ),
    "hypervisor_without_upper_zmm": (
        sapphire_rapids(xcr0=X87_SSE | YMM | 0x60),
        "avx_vnni",
        NO_AVX512 - {"amx_int8", "amx_bf16"},
    ),
    "hypervisor_without_ymm": (
        sapphire_rapids(xcr0=X87_SSE),
        "scalar",
        FMA_AVX2 | CLIENT | (NO_AVX512 - {"amx_int8", "amx_bf16"}),
    ),
    "hypervisor_without_xsave": (
        sapphire_rapids(xcr0=0, ecx1=FMA | F16C | AVX),
        "scalar",
        FMA_AVX2 | CLIENT | (NO_AVX512 - {"amx_int8", "amx_bf16"}),
    ),
    "nothing": (registers(ecx1=0, xcr0=0), "scalar", FMA_AVX2 | CLIENT | NO_AVX512),
    "avx2_without_fma": (
        registers(ecx1=OSXSAVE | AVX | F16C, ebx7=AVX2),
        "scalar",
        {"fma"} | CLIENT | NO_AVX512,
    ),
}
