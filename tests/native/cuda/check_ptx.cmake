# Is every operation of the CUDA kernels rounded on its own? cmake -DPTX=file -P check_ptx.cmake
#
# In PTX `mul.f32` without a rounding may be joined with an addition, by the assembler or by the driver; `mul.rn.f32` may not. Divisions and
# roots are single instructions here, correctly rounded (.rn), whatever they become in machine code.
file(READ "${PTX}" text LIMIT 4000)
if(NOT text MATCHES "\\.target sm_")
  message(FATAL_ERROR "${PTX} is no PTX")
endif()
foreach(wanted "div\\.rn\\.f32" "sqrt\\.rn\\.f32" "mul\\.rn\\.f32" "add\\.rn\\.f32" "add\\.rn\\.f64" "add\\.rz\\.f32" "shfl\\.sync")
  file(STRINGS "${PTX}" found REGEX "${wanted}" LIMIT_COUNT 1)
  if(NOT found)
    message(FATAL_ERROR "there is no ${wanted}: what is checked is not what was meant")
  endif()
endforeach()
file(STRINGS "${PTX}" kernels REGEX "^\\.visible \\.entry|^\\.entry")
list(LENGTH kernels count)
if(count LESS 130)  # 13 rules with formats, each for 9 pairs of gradient and master, and once for any
  message(FATAL_ERROR "only ${count} kernels")
endif()
file(STRINGS "${PTX}" wrong
  REGEX "[ \t](fma|mad)\\.[a-z.]*f(16|32|64)|\\.ftz|\\.approx|\\.full|[ \t](add|sub|mul|div|sqrt|rcp)\\.(f32|f64)[ \t]|\\.r[mp]\\.f")
if(wrong)
  string(REPLACE ";" "\n" wrong "${wrong}")
  message(FATAL_ERROR "these may be contracted or are not rounded to nearest:\n${wrong}")
endif()
message(STATUS "${count} kernels, each operation rounded on its own")
