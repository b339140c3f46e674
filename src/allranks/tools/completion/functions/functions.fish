# The command that the line has before the cursor, as "trace show"; once its program has begun, "program".
function __allranks_command
    set -l line (commandline -opc)
    set -l command
    set -l value no
    for word in $line[2..-1]
        if test $value = yes
            set value no
        else if test "$word" = --
            echo program
            return
        else if string match -q -- '-*' $word
            if contains -- "$command $word" $__allranks_valued
                set value yes
            end
        else if contains -- (string join ' ' $command $word) $__allranks_commands
            set command (string join ' ' $command $word)
        else if contains -- "$command" $__allranks_programs
            echo program
            return
        end
    end
    echo $command
end

function __allranks_is
    set -l command (__allranks_command)
    test "$command" = "$argv"
end

complete -c allranks -f
complete -c allranks -n '__allranks_is program' -F
