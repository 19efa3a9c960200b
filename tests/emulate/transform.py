#!/usr/bin/env python3
"""CUDA C++ to C++ for the emulated GPU: launches, shared memory, inline PTX, mathematical functions.

    transform.py NAME IN OUT        NAME: the file's name in messages and for debuggers

Lines keep their numbers. What the emulator does not know ends with one line that names it, and exit code 1: a __shared__
that stayed as it is would silently be a variable of each thread.
"""
import re
import sys

# Of the identifiers that begin with __, those that include/cuda_runtime.h or NVIDIA's headers define for the host.
KNOWN = set("""__global__ __device__ __host__ __forceinline__ __restrict__ __constant__
    __syncthreads __syncthreads_or __syncwarp __shfl_sync __shfl_xor_sync __shfl_down_sync __ballot_sync __popc
    __cvta_generic_to_shared __float_as_uint __uint_as_float
    __nv_bfloat16 __nv_bfloat162 __bfloat162float __float2bfloat16_rn __floats2bfloat162_rn
    __nv_fp8_interpretation_t __nv_cvt_float2_to_fp8x2 __NV_SATFINITE __NV_NOSAT __NV_E4M3 __NV_E5M2
    __VA_ARGS__ __FILE__ __LINE__""".split())

PTX = {
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "emulate::ldmatrix_x4(false, ",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "emulate::ldmatrix_x4(true, ",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "emulate::mma_m16n8k16_bf16(",
    "ex2.approx.ftz.f32": "emulate::ex2_approx_ftz(",
    "cp.async.cg.shared.global": "emulate::cp_async(",  # its number of bytes comes first
    "cp.async.ca.shared.global": "emulate::cp_async(",
    "cp.async.wait_all;": "emulate::cp_async_wait_all(",
}

# Functions that CUDA does not round correctly: EMULATE_ULP moves their results. The others below are exact on both.
MATH = "expf exp2f logf rsqrtf sinf cosf sincosf log cos sin sincos sincospi".split()
EXACT = "sqrtf sqrt fmaxf fminf fmax fmin fabsf fabs isnan isinf isfinite max min".split()
UNKNOWN_MATH = """exp exp2 exp10 exp10f expm1 expm1f log2 log2f log10 log10f log1p log1pf pow powf tan tanf tanh tanhf
    sinh cosh sinpi sinpif cospi cospif sincospif rsqrt rcbrt cbrt cbrtf hypot hypotf erf erff erfc fma fmaf
    fdividef fmod fmodf""".split()


class Unknown(Exception):
    pass


def without_comments(text):
    """Comments become blanks; strings stay."""
    token = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.S)
    return token.sub(lambda m: re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0], text)


def closing(text, begin):
    """The bracket that closes the one at `begin`."""
    depth, i = 0, begin
    while i < len(text):
        if text[i] == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise Unknown("a bracket that is not closed")


def arguments(text):
    """Splits at the commas outside of brackets and strings."""
    parts, begin, i = [], 0, 0
    while i < len(text):
        if text[i] in '([{':
            i = closing(text, i)
        elif text[i] == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif text[i] == ",":
            parts.append(text[begin:i].strip())
            begin = i + 1
        i += 1
    last = text[begin:].strip()
    return parts + [last] if last else parts


def replaced(text, begin, end, new):
    """The old text's line breaks follow the new one."""
    return text[:begin] + new + "\n" * (text[begin:end].count("\n") - new.count("\n")) + text[end:]


def launches(text):
    while (at := text.find("<<<")) >= 0:
        head = re.search(r"([A-Za-z_]\w*(?:<[^;{}<>]*>)?)\s*$", text[:at])
        end = text.find(">>>", at)
        if not head or end < 0 or not re.match(r"\s*\(", text[end + 3:]):
            raise Unknown("a launch of another form than kernel<<<...>>>(...)")
        config = arguments(text[at + 3:end])
        if len(config) != 4:
            raise Unknown("a launch without grid, block, shared memory and stream")
        opened = text.index("(", end)
        closed = closing(text, opened)
        values = text[opened + 1:closed].strip()
        new = f'emulate::launch({head[1]}, {", ".join(config)}{", " + values if values else ""})'
        text = replaced(text, head.start(1), closed + 1, new)
    return text


def launch_bounds(text):
    while m := re.search(r"__launch_bounds__\s*\(", text):
        closed = closing(text, m.end() - 1)
        body = text.index("{", closed) + 1
        text = f"{text[:body]} emulate::launch_bound({arguments(text[m.end():closed])[0]});{text[body:]}"
        text = replaced(text, m.start(), closed + 1, "")
    return text


def shared_memory(text):
    text = re.sub(r"extern\s+__shared__\s+([\w:]+)\s+(\w+)\[\]\s*;",
                  r"\1* \2 = static_cast<\1*>(emulate::dynamic_shared(alignof(\1)));", text)

    def static(m):
        element, new = m[1], []
        for declarator in arguments(m[2]):
            name, extents = re.fullmatch(r"(\w+)\s*((?:\[[^\]]+\])*)", declarator).groups()
            new.append(f"static constinit emulate::Shared<{element}{extents}> {name}_of_block; "
                       f"auto& {name} = {name}_of_block.of_this_block();")
        return " ".join(new)

    return re.sub(r"__shared__\s+([\w:]+)\s+([^;=]+);", static, text)


def ptx(text):
    while m := re.search(r"\basm\s+volatile\s*\(", text):
        closed = closing(text, m.end() - 1)
        body = text[m.end():closed]
        code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', re.split(r'"\s*:', body)[0] + '"'))
        mnemonic = code.split()[0]
        if mnemonic not in PTX:
            raise Unknown(f"PTX instruction {mnemonic}")
        operands = [body[c.end():closing(body, c.end() - 1)] for c in re.finditer(r'"[=+]?[rfl]"\s*\(', body)]
        constants = re.findall(r", (\d+)", code)
        new = PTX[mnemonic] + ", ".join([*constants, *operands, "emulate::Where::current())"])
        text = replaced(text, m.start(), closed + 1, new)
    return text


def mathematics(text):
    call = r"(?<![\w.:>])(%s)(?=\s*\()"
    if m := re.search(call % "|".join(UNKNOWN_MATH), text):
        raise Unknown(f"the function {m[1]}: add it to MATH with CUDA's bound, or to EXACT")
    return re.sub(call % "|".join(MATH), r"emulate::\1", text)


def check(text):
    for pattern, what in ((r"<<<|>>>", "a launch"), (r"\b__shared__\b", "__shared__ of another form"),
                          (r"\basm\b", "asm of another form"),
                          (r"\bcooperative_groups\b|\bcg::", "cooperative groups")):
        if m := re.search(pattern, text):
            raise Unknown(what, m.start())
    for m in re.finditer(r"\b__\w+", text):
        if m[0] not in KNOWN:
            raise Unknown(m[0], m.start())


def main():
    name, source, target = sys.argv[1:]
    text = without_comments(open(source, encoding="utf-8").read())
    try:
        text = ptx(text)
        text = launch_bounds(text)
        text = shared_memory(text)
        text = launches(text)
        text = mathematics(text)
        check(text)
    except Unknown as unknown:
        line = text[:unknown.args[1]].count("\n") + 1 if len(unknown.args) > 1 else 1
        sys.exit(f"{name}:{line}: {unknown.args[0]} (the emulated GPU does not know it: tests/emulate/transform.py)")
    with open(target, "w", encoding="utf-8") as file:
        file.write(f'#line 1 "{name}"\n{text}')


if __name__ == "__main__":
    main()
