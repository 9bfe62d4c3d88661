# Is every operation of the CUDA kernels rounded on its own? cmake -DPTX=file -P check_ptx.cmake
#
# In PTX `mul.f32` without a rounding may be joined with an addition, by the assembler or by the driver; `mul.rn.f32` may not. Divisions and
# roots are single instructions here, correctly rounded (.rn), whatever they become in machine code. octet.h has fma.rn and a few
# approximations where the bits are the same, and norm.h fma.rn of exact squares; kernels without roots and without int8 moments show that
# the compiler adds no fma.
file(READ "${PTX}" text LIMIT 4000)
if(NOT text MATCHES "\\.target sm_")
  message(FATAL_ERROR "${PTX} is no PTX")
endif()
foreach(wanted "div\\.rn\\.f32" "sqrt\\.rn\\.f32" "mul\\.rn\\.f32" "add\\.rn\\.f32" "add\\.rn\\.f64" "fma\\.rn\\.f32"
               "[ \t]sqrt\\.approx\\.ftz\\.f32" "rcp\\.approx\\.ftz\\.f32" "rsqrt\\.approx\\.ftz\\.f32" "shfl\\.sync")
  file(STRINGS "${PTX}" found REGEX "${wanted}" LIMIT_COUNT 1)
  if(NOT found)
    message(FATAL_ERROR "there is no ${wanted}: what is checked is not what was meant")
  endif()
endforeach()
file(STRINGS "${PTX}" wrong
  REGEX
  "[ \t]mad\\.[a-z.]*f(16|32|64)|[ \t]fma\\.[a-z.]*f16|[ \t](add|sub|mul|div|sqrt|rcp|fma)\\.(f32|f64)[ \t]|\\.r[mpz]\\.f|\\.ftz|\\.approx|\\.full")
list(FILTER wrong EXCLUDE REGEX "[ \t](sqrt|rcp|rsqrt)\\.approx\\.ftz\\.f32[ \t]")

set(kernels 0)
set(bare 0)
set(name "")
file(STRINGS "${PTX}" lines REGEX "\\.entry |[ \t]fma\\.rn\\.")
foreach(line IN LISTS lines)
  if(line MATCHES "\\.entry ([A-Za-z0-9_]+)")
    math(EXPR kernels "${kernels} + 1")
    set(name "")
    set(norm FALSE)
    if(CMAKE_MATCH_1 MATCHES "block_sums_kernel")
      set(norm TRUE)
    elseif(NOT CMAKE_MATCH_1 MATCHES "FormatE2|4AdamE|7AdagradE|8AdEMAMixE")
      set(name "${CMAKE_MATCH_1}")
      math(EXPR bare "${bare} + 1")
    endif()
  elseif(norm AND line MATCHES "fma\\.rn\\.f64")
    set(squares TRUE)
  elseif(name OR norm OR line MATCHES "fma\\.rn\\.f64")
    list(APPEND wrong "${name}:${line}")
  endif()
endforeach()
if(kernels LESS 160 OR bare LESS 51)  # 16 rules with formats, each for 9 pairs of gradient and master, and once for any; 5 of them are bare
  message(FATAL_ERROR "only ${kernels} kernels, and ${bare} of them without roots and int8 moments")
endif()
if(NOT squares)
  message(FATAL_ERROR "norms have no fma.rn.f64")
endif()
if(wrong)
  string(REPLACE ";" "\n" wrong "${wrong}")
  message(FATAL_ERROR "these may be contracted or are not rounded to nearest:\n${wrong}")
endif()
message(STATUS "${kernels} kernels, each operation rounded on its own")
